"""Sampling parameters of requests, besides length.

Of each kind there are some in every workload, so that every drill moves, preempts, repeats and
drafts answers that look back at their own tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from epd.messages import SamplingParams
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.engine.sampler import EOS, FIRST_WORD

SEEDED = SamplingParams(max_tokens=0, temperature=1.0)
FEW_WORDS = 8  # so few repeat within an answer, which is what penalties are about

Draw = Callable[[KeyedRandom, int], SamplingParams]


def _seeded(random: KeyedRandom, num_words: int) -> SamplingParams:
    return SEEDED


def _greedy(random: KeyedRandom, num_words: int) -> SamplingParams:
    return SamplingParams(max_tokens=0)


def _penalised(random: KeyedRandom, num_words: int) -> SamplingParams:
    """One to three of the penalties, now and then with a bias on top."""
    which = 1 + random.below(7, "penalties")
    words = (FIRST_WORD + random.below(num_words, "biased", n) for n in range(2))
    bias = tuple((word, random.between(-4.0, 4.0, "bias", word)) for word in sorted(set(words)))
    return msgspec.structs.replace(
        _tempered(random),
        top_k=num_words,
        frequency_penalty=random.pick((0.5, 1.5, -0.5), "frequency") if which & 1 else 0.0,
        presence_penalty=random.pick((0.8, 1.9, -0.8), "presence") if which & 2 else 0.0,
        repetition_penalty=random.pick((1.3, 2.0, 0.7), "repetition") if which & 4 else 1.0,
        logit_bias=bias if random.chance(0.3, "biased") else (),
    )


def _by_grammar(random: KeyedRandom, num_words: int) -> SamplingParams:
    size = 7 if num_words >= 7 else 2
    return msgspec.structs.replace(_tempered(random), top_k=num_words, grammar=f"modulo {size}")


def _restricted(random: KeyedRandom, num_words: int) -> SamplingParams:
    """Only some words, or not these; with three words, one is always left."""
    words = [FIRST_WORD + n for n in range(num_words)]
    first = random.below(num_words, "first")
    one, other = words[first], words[(first + 1) % num_words]
    params = msgspec.structs.replace(_tempered(random), top_k=num_words)
    if random.chance(0.5, "allowed"):
        allowed = (EOS, *(word for word in words if word != one))
        return msgspec.structs.replace(params, allowed_token_ids=allowed)
    return msgspec.structs.replace(params, bad_words=((one,), (other, words[first - 1])))


def _at_least(random: KeyedRandom, num_words: int) -> SamplingParams:
    """So many tokens; behind them also a word of the client's own may end the answer."""
    params = msgspec.structs.replace(SEEDED, min_tokens=1 + random.below(8, "at least"))
    if random.chance(0.5, "any words"):
        return params
    stop = FIRST_WORD + random.below(num_words, "stop")
    return msgspec.structs.replace(params, top_k=num_words, stop_token_ids=(stop,))


def _scored(random: KeyedRandom, num_words: int) -> SamplingParams:
    return msgspec.structs.replace(_tempered(random), num_logprobs=1, num_prompt_logprobs=0)


def _tempered(random: KeyedRandom) -> SamplingParams:
    return SEEDED if random.chance(0.6, "temperature") else SamplingParams(max_tokens=0)


KINDS: dict[str, Draw] = {
    "seeded": _seeded, "greedy": _greedy, "penalised": _penalised, "grammar": _by_grammar,
    "restricted": _restricted, "at least": _at_least, "scored": _scored,
}  # fmt: skip
MIXED = (
    *("seeded", "seeded", "greedy", "penalised"),
    *("penalised", "grammar", "restricted", "at least"),
)
LOOKING_BACK = ("penalised", "grammar", "restricted")


def draw(random: KeyedRandom, kinds: tuple[str, ...], num_words: int) -> SamplingParams:
    """One client's; `num_words`: of all answers of its workload, 0: as many as it likes."""
    params = KINDS[random.pick(kinds, "kind")](random, num_words or FEW_WORDS)
    if random.chance(0.2, "logprobs"):
        params = msgspec.structs.replace(params, num_logprobs=random.below(3, "likeliest"))
    if random.chance(0.1, "prompt logprobs"):
        params = msgspec.structs.replace(params, num_prompt_logprobs=0)
    return params


def told(params: SamplingParams) -> str:
    """What is not as `SEEDED` has it: `, temperature=0.0, grammar='modulo 7'`."""
    names = params.__struct_fields__
    differ = [name for name in names if getattr(params, name) != getattr(SEEDED, name)]
    return "".join(f", {name}={getattr(params, name)!r}" for name in differ)
