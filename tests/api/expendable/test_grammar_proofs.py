"""Grammars are proved in children that may die, and what they accept no instance dies of (F66).

The oracle is a process that works as an instance does: with the launch thread's stack, and answers
longer than a proof's.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import count, islice
from typing import Any

import pytest

from epd.api.asked.structured import Constraint
from epd.api.asked.tools import ToolUse
from epd.api.expendable import grammar_proofs
from epd.api.expendable.grammar_proofs import PROOF_STACK_NBYTES, GrammarProofs
from epd.api.http.errors import ApiError
from epd.engine.base import LAUNCH_STACK_NBYTES
from epd.model_files.grammar import Grammars
from epd.tiny import CHECKPOINT
from tests.api.fakes import chat_asked
from tests.grammars import VOCAB_SIZE, next_tokens
from tests.hostile.deadly import CHAIN, DEEP, SLOW, chain
from tests.hostile.forked import forked
from tests.hostile.grammars import grammar, regex
from tests.hostile.schemas import schema

PARAM = "response_format.json_schema.schema"
NUM_TOKENS = 100  # of an answer at the oracle


@pytest.fixture
async def proofs(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarProofs]:
    monkeypatch.setattr(grammar_proofs, "LANES", ((0.1, 2, 30), (0.6, 1, 8)))
    made = GrammarProofs(CHECKPOINT, VOCAB_SIZE)
    yield made
    await made.close()


def schema_of(value: Any) -> Constraint:
    return Constraint("json", value, PARAM)


def told(proofs: GrammarProofs) -> dict[str, float]:
    return {sample.labels[0][1]: sample.value for sample in proofs.samples()}


async def refused(proofs: GrammarProofs, source: Constraint | ToolUse) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await proofs.grammar(source)
    return caught.value


async def test_a_death_is_a_refusal_and_is_remembered(proofs: GrammarProofs) -> None:
    function = {"name": "f", "parameters": DEEP}
    tools = [
        {"type": "function", "function": {"name": "g"}},
        {"type": "function", "function": function},
    ]
    use = chat_asked(tools=tools, tool_choice="required").tool_use
    assert use is not None
    for source, param in (
        (schema_of(DEEP), PARAM),
        (Constraint("grammar", CHAIN, "guided_grammar"), "guided_grammar"),
        (Constraint("grammar", chain(2000), "ebnf"), "ebnf"),  # passes where a stack has 8 MiB
        (use, "tools[1].function.parameters"),
    ):
        for _ in range(2):
            error = await refused(proofs, source)
            assert (error.status, error.param) == (400, param)
            assert "too deeply" in error.message
    assert told(proofs) == {"crash": 4, "remembered": 4}


async def test_what_takes_long_is_refused_and_holds_up_no_other(proofs: GrammarProofs) -> None:
    slow = asyncio.create_task(refused(proofs, Constraint("grammar", SLOW, "ebnf")))
    await proofs.grammar(schema_of({}))  # the fork server is there
    began_s = time.monotonic()
    for i in range(5):
        await proofs.grammar(schema_of({"const": i}))
    assert not slow.done()
    assert time.monotonic() - began_s < 2.0  # 0.05 on an idle machine
    error = await slow
    assert (error.status, error.param) == (400, "ebnf")
    assert "0.6 s of a processor" in error.message
    assert told(proofs) == {"accepted": 6, "time": 1}


async def test_one_text_is_proved_once(proofs: GrammarProofs) -> None:
    sources = [schema_of({"const": i % 2}) for i in range(20)]
    texts = await asyncio.gather(*map(proofs.grammar, sources))
    assert len(set(texts)) == 2
    assert await proofs.grammar(sources[0]) == texts[0]
    assert told(proofs) == {"accepted": 2, "remembered": 1}


async def test_each_tenant_has_its_own_proof(proofs: GrammarProofs) -> None:
    """Else the time of an answer would tell whether another one has sent the same schema."""
    source = schema_of({"const": 1})
    texts = await asyncio.gather(*(proofs.grammar(source, scope) for scope in ("a", "b", "a")))
    assert len(set(texts)) == 1
    assert told(proofs) == {"accepted": 2}


async def test_too_many_at_once_are_told_to_come_again(proofs: GrammarProofs) -> None:
    sources = [schema_of({"const": i}) for i in range(40)]
    answers = await asyncio.gather(*map(proofs.grammar, sources), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, ApiError)]
    assert {(error.status, error.code) for error in errors} == {(429, "overloaded")}
    assert told(proofs) == {"accepted": 2 + 30, "full": len(errors)}
    assert len(errors) == 40 - 2 - 30


ASKED = f"""
import asyncio, json, sys
from epd.api.expendable.grammar_proofs import GrammarProofs
from epd.api.asked.structured import Constraint
async def main():
    proofs = GrammarProofs({str(CHECKPOINT)!r}, {VOCAB_SIZE})
    await proofs.grammar(Constraint("json", {{}}, ""))
    await proofs.close()
    print(json.dumps([name for name in ("llguidance", "torch") if name in sys.modules]))
asyncio.run(main())
"""


def test_the_gateway_does_not_even_load_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == []


LAUNCHED = f"""
import asyncio
from epd.engine.device.executor import DeviceExecutor
from epd.model_files.grammar import Grammars
from tests.hostile.deadly import CHAIN
async def main():
    executor, grammars = DeviceExecutor(), Grammars({str(CHECKPOINT)!r}, {VOCAB_SIZE})
    assert await executor.launch(grammars.fault, CHAIN) == ""
asyncio.run(main())
"""


def test_an_instance_has_more_stack_than_a_proof() -> None:
    """A chain of three times what a proof lets pass does not end the launch thread."""
    assert LAUNCH_STACK_NBYTES >= 8 * PROOF_STACK_NBYTES
    subprocess.run([sys.executable, "-c", LAUNCHED], check=True, timeout=60)


# --- the fuzzer: the test of each new llguidance ------------------------------------------------


def hostile(seed: int) -> Iterator[Constraint]:
    for number in count(seed):
        for kind, value in (
            ("json", schema(number)),
            ("regex", regex(number)),
            ("grammar", grammar(number)),
        ):
            try:
                found = chat_asked(**{f"guided_{kind}": value}).constraint
            except ApiError:  # too long, or no schema: refused before anything is compiled
                continue
            assert found is not None
            yield found


def work_as_an_instance(texts: list[str]) -> None:
    """Answers of a model that draws at random.  A ValueError would be a request's failure."""
    grammars = Grammars(CHECKPOINT, VOCAB_SIZE)
    for number, text in enumerate(texts):
        draw = random.Random(number)
        token_ids: list[int] = []
        try:
            while len(token_ids) < NUM_TOKENS:
                allowed = next_tokens(grammars, str(number), text, token_ids)
                if not len(allowed) or (token := int(draw.choice(allowed))) in (256, 258):
                    break
                token_ids.append(token)
            next_tokens(grammars, str(number), text, token_ids[: len(token_ids) // 2])
        except ValueError:
            continue


def survives(texts: list[str]) -> bool:
    """Whether a process lives on that works as an instance does."""

    def work() -> str:
        threading.stack_size(LAUNCH_STACK_NBYTES)
        thread = threading.Thread(target=work_as_an_instance, args=(texts,))
        thread.start()
        thread.join()
        return "lives"

    return forked(work) == "lives"


@pytest.mark.parametrize(
    ("num_s", "most"),
    [(5.0, 45), pytest.param(60.0, 10**9, marks=[pytest.mark.long, pytest.mark.timeout(400)])],
)
async def test_what_is_accepted_kills_no_instance(
    proofs: GrammarProofs, num_s: float, most: int
) -> None:
    outcomes: Counter[str] = Counter()
    until_s, hard = time.monotonic() + num_s, islice(hostile(0), most)
    while time.monotonic() < until_s and (sources := list(islice(hard, 15))):
        answers = await asyncio.gather(*map(proofs.grammar, sources), return_exceptions=True)
        accepted = []
        for source, answer in zip(sources, answers, strict=True):
            if isinstance(answer, str):
                accepted.append(answer)
            else:
                assert isinstance(answer, ApiError), (source, answer)
                assert answer.status in (400, 429), (source, answer)
                assert answer.status == 429 or answer.param == source.param
            outcomes[f"{source.kind} {'taken' if isinstance(answer, str) else 'refused'}"] += 1
        assert await asyncio.to_thread(survives, accepted), accepted
    print(outcomes, told(proofs))
    for kind in ("json", "regex", "grammar"):
        assert outcomes[f"{kind} taken"] and outcomes[f"{kind} refused"], outcomes
