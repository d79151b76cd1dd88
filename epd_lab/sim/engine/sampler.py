"""The simulated model's last step, a pure function: from KV and sampling parameters to a token.

Its input is that of a real sampler: the KV of all that is before, and the seed and the output's
index (neither, if greedy).  Where penalties, bad words or a grammar look back, it is every token of
the prompt and of the output so far, each in its place.  So a loss of any gives a wrong token,
nearly always the very next one.

A grammar is `modulo N`: its state is a number below N made of every token of the answer, and
decides the words that may come next.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from epd.messages import SamplingParams, TokenLogprobs

EOS = 2
VOCABULARY = 1000
FIRST_WORD = 10
MAX_SCORED = 24  # words that somebody is asked about who needs more than a draw
DIGEST_NBYTES = 64
GREEDY_BELOW = 1e-5
SURE = 9.0  # above what any word can have


@dataclass(frozen=True, slots=True)
class Past:
    """What is before the token to be sampled."""

    kv: bytes  # records of all tokens
    output_index: int
    prompt_ids: Sequence[int] = ()  # these two only where the sampling `reads_output`
    output_ids: Sequence[int] = ()


def sample(past: Past, sampling: SamplingParams) -> TokenLogprobs:
    """The next token; ValueError when the output so far cannot have come from the grammar."""
    digest = _digest(past, sampling)
    if sampling.adjusts(past.output_index):
        logits = _logits(digest, past, sampling)
        token = max(logits, key=lambda token: logits[token])
    else:
        token = _drawn(digest, past, sampling)
    if sampling.num_logprobs < 0:
        return TokenLogprobs(token, 0.0)
    top = tuple((FIRST_WORD + byte, -byte / 64) for byte in digest[: sampling.num_logprobs])
    return TokenLogprobs(token, -digest[-1] / 64, top)


def score_of(record: bytes, token_id: int) -> TokenLogprobs:
    """Of a prompt's token behind the one with this KV record."""
    return TokenLogprobs(token_id, -1.0 - record[0], rank=1)


def _digest(past: Past, sampling: SamplingParams) -> bytes:
    key = b"greedy"
    if sampling.temperature >= GREEDY_BELOW:
        key = struct.pack("<qi", sampling.seed % (1 << 62), past.output_index)
    hashed = hashlib.blake2b(past.kv, digest_size=DIGEST_NBYTES, key=key)
    if sampling.reads_output:
        ids = (len(past.prompt_ids), *past.prompt_ids, *past.output_ids)
        hashed.update(array("q", ids).tobytes())
    return hashed.digest()


def _is_time_to_end(digest: bytes, past: Past) -> bool:
    return digest[0] % 32 == 0 and past.output_index > 0


def _drawn(digest: bytes, past: Past, sampling: SamplingParams) -> int:
    """With a small `top_k`, one of so few words, so that answers repeat and can be drafted."""
    if _is_time_to_end(digest, past):
        return EOS
    number = int.from_bytes(digest[1:8], "little")
    return FIRST_WORD + number % (sampling.top_k or VOCABULARY - FIRST_WORD)


def _logits(digest: bytes, past: Past, sampling: SamplingParams) -> dict[int, float]:
    """Of the tokens that may be drawn, after all parameters; the order is the real one's."""
    num_words = min(sampling.top_k or MAX_SCORED, MAX_SCORED)
    logits = {FIRST_WORD + n: byte / 32 for n, byte in enumerate(digest[1 : 1 + num_words])}
    logits[EOS] = SURE if _is_time_to_end(digest, past) else -SURE
    for token, bias in sampling.logit_bias:
        if token in logits:
            logits[token] += bias
    _penalise(logits, past, sampling)
    if sampling.grammar:
        size, state = follow(sampling.grammar, past.output_ids)
        logits = {t: logit for t, logit in logits.items() if _admits(size, state, t)}
    if past.output_index < sampling.min_tokens:
        logits = {t: logit for t, logit in logits.items() if t not in sampling.stop_token_ids}
    if sampling.allowed_token_ids:
        logits = {t: logit for t, logit in logits.items() if t in sampling.allowed_token_ids}
    for word in sampling.bad_words:
        begun = list(word[:-1])
        if not begun or list(past.output_ids[-len(begun) :]) == begun:
            logits.pop(word[-1], None)
    return logits


def _penalise(logits: dict[int, float], past: Past, sampling: SamplingParams) -> None:
    """Repetition over prompt and output; frequency and presence over the output alone."""
    if sampling.repetition_penalty != 1.0:
        seen = {*past.prompt_ids, *past.output_ids}
        for token, logit in logits.items():
            if token in seen:
                penalty = sampling.repetition_penalty
                logits[token] = logit / penalty if logit > 0 else logit * penalty
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token, count in Counter(past.output_ids).items():
            if token in logits:
                logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty


def follow(grammar: str, output_ids: Sequence[int]) -> tuple[int, int]:
    """The grammar's size, and its state behind this answer; ValueError if the answer left it."""
    size, state = int(grammar.removeprefix("modulo ")), 0
    for token in output_ids:
        if not _admits(size, state, token):
            raise ValueError(f"the answer left its grammar: {token} in state {state} of {size}")
        state = (3 * state + token + 1) % size
    return size, state


def _admits(size: int, state: int, token: int) -> bool:
    """The end in state 0; of as many words in a row as the grammar has states, at least half."""
    if token == EOS:
        return state == 0
    return token * (state + 1) % size < (size + 1) // 2
