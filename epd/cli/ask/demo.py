"""Questions about sample images, to a temporary cluster of real processes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from epd.cli.ask.client import Client, ClientAnswer
from epd.cli.ask.question import AskSampling, user_message
from epd.cli.ask.temporary import with_server
from epd.cli.boundary import CommandFailed
from epd.cli.start.plan import StartPlan
from epd.tiny import RECEIPT, SAMPLES
from epd.tiny.samples import read_index

LAST_STATES = {"FINISHED", "FAILED", "DELIVERED", "CANCELLED", "EXPIRED"}  # nobody leaves them


def run_demo(plan: StartPlan, *, keep: bool) -> int:
    """Ask the demo's questions; 0 if every answer is right."""

    async def work(client: Client) -> int:
        wrong = 0
        for sample in (entry for entry in read_index() if entry.demo):
            images = [str(SAMPLES / name) for name in sample.images]
            answer = await client.ask([user_message(sample.question, images)], AskSampling())
            _show_sample(sample, answer)
            wrong += answer.text != sample.answer
        _say_where(plan)
        if keep:
            print("\nCtrl-C stops it.", flush=True)
            await asyncio.get_running_loop().create_future()
        if wrong:
            raise CommandFailed(f"{wrong} answers were wrong")
        return 0

    return with_server(plan, work)


def _show_sample(sample: Any, answer: ClientAnswer) -> None:
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


def _say_where(plan: StartPlan) -> None:
    assert plan.gateway is not None
    base_url = plan.gateway.base_url
    names = ", ".join(i.instance_id for i in plan.instances)
    print(f"\nServed by a gateway on {base_url}/v1 and the processes {names}.")
    print("Ask more while it is up (epd demo --keep), for example:")
    print(f'  epd ask "What is the total?" --image {SAMPLES / RECEIPT} --url {base_url}')
    print(f"  epd chat --url {base_url}")
