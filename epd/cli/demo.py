"""Questions about sample pictures, to a temporary cluster of real processes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from epd.cli.boundary import CommandFailed
from epd.cli.client import Answer, ask
from epd.cli.plan import Plan
from epd.cli.question import Question
from epd.cli.supervisor import running
from epd.tiny import SAMPLES
from epd.tiny.samples import read_index

LAST_STATES = {"FINISHED", "FAILED", "RELEASED", "CANCELLED", "EXPIRED"}  # nobody leaves them


def ask_running(question: Question, base_url: str, *, as_json: bool) -> int:
    _show_answer(ask(base_url, question), as_json=as_json)
    return 0


def ask_temporary(question: Question, plan: Plan, *, as_json: bool) -> int:
    async def work() -> int:
        answer = await asyncio.to_thread(ask, _base_url(plan), question)
        _show_answer(answer, as_json=as_json)
        return 0

    return _with_cluster(plan, work)


def run_demo(plan: Plan, *, keep: bool) -> int:
    """Ask the demo's questions; 0 if every answer is right."""

    async def work() -> int:
        wrong = 0
        for sample in (entry for entry in read_index() if entry.demo):
            images = tuple(str(SAMPLES / name) for name in sample.images)
            question = Question(sample.question, images)
            answer = await asyncio.to_thread(ask, _base_url(plan), question)
            _show_sample(sample, answer)
            wrong += answer.text != sample.answer
        _say_where(plan)
        if keep:
            print("\nCtrl-C stops it.", flush=True)
            await asyncio.get_running_loop().create_future()
        if wrong:
            raise CommandFailed(f"{wrong} answers were wrong")
        return 0

    return _with_cluster(plan, work)


def _with_cluster(plan: Plan, work: Callable[[], Awaitable[int]]) -> int:
    """Run `work` against the serving cluster; Ctrl-C and SIGTERM end both, in order."""

    async def live() -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        async with running(plan):
            return await work()

    try:
        return asyncio.run(live())
    except asyncio.CancelledError:
        return 130


def _base_url(plan: Plan) -> str:
    assert plan.gateway is not None
    return f"http://{plan.gateway.host}:{plan.gateway.port}"


def _show_answer(answer: Answer, *, as_json: bool) -> None:
    print(answer.as_json() if as_json else answer.text, flush=True)


def _show_sample(sample: Any, answer: Answer) -> None:
    mark = "right" if answer.text == sample.answer else f"WRONG, it is {sample.answer!r}"
    print(f"\n{', '.join(sample.images)}")
    print(f"  question  {sample.question}")
    print(f"  answer    {answer.text}   ({mark})")
    usage = answer.usage
    print(f"  tokens    {usage['prompt_tokens']} in, {usage['completion_tokens']} out")
    for line in timeline_lines(answer.timeline):
        print(f"  {line}")
    sys.stdout.flush()


def timeline_lines(timeline: list[dict[str, Any]]) -> list[str]:
    """One line per stay of a machine in a state: when it began, how long it lasted, where."""
    lines = []
    last_of: dict[tuple[str, str], float] = {}
    for entry in reversed(timeline):
        machine = entry["machine"]
        until = last_of.get((machine, entry.get("key", "")))
        last_of[machine, entry.get("key", "")] = entry["t_ms"]
        if "ms" in entry:  # it says itself how long it lasted
            until = entry["t_ms"] + entry["ms"]
        name, _, instance = machine.partition("@")
        is_last = until is None or entry["state"] in LAST_STATES
        lasted = " " * 12 if is_last else f"{until - entry['t_ms']:9.1f} ms"
        lines.append(f"{entry['t_ms']:9.1f} ms {lasted}  {instance:8} {name:10} {entry['state']}")
    return ["   began at      lasted  where    machine    state", *reversed(lines)]


def _say_where(plan: Plan) -> None:
    base_url = _base_url(plan)
    names = ", ".join(i.instance_id for i in plan.instances)
    print(f"\nServed by a gateway on {base_url}/v1 and the processes {names}.")
    print("Ask more while it is up (epd demo --keep), for example:")
    print(f'  epd ask "What is the total?" --image receipt.png --url {base_url}')
