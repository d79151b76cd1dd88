"""Servers side by side under vLLM's own client.

`python -m tests.gpu.speed.beside_vllm --served-model-name NAME vllm=http://... epd=http://...`:
each workload of docs/performance.md goes to each server in turn, the same bodies to all, new images
in each repeat.  Ratios are to the first server.  The client is `benchmark` of `vllm bench serve`
(0.26), so vllm must be importable; the name is that by which all servers call the model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import statistics
import sys
import time
import urllib.request
from typing import Any

from epd_lab.bench.workload import NAMED, Closed, Wording, bodies

WORKLOADS = ("text", "3x560", "1x1080p", "4x1080p")
SHOWN = {
    "request_throughput": "req/s",
    "median_tpot_ms": "TPOT p50",
    "p99_itl_ms": "ITL p99",
    "median_itl_ms": "ITL p50",
    "median_ttft_ms": "TTFT p50",
    "p99_ttft_ms": "TTFT p99",
}


class Words:
    """In place of a tokenizer: the client counts with it what no server has counted."""

    def __call__(self, text: str, **_: Any) -> Any:
        return argparse.Namespace(input_ids=text.split())


def prompt_tokens(url: str, model: str, words: int) -> int:
    """What a server counts for a prompt of `words` words."""
    message = {"role": "user", "content": Wording(1.0).text(words, "probe")}
    body = json.dumps({"model": model, "max_tokens": 1, "messages": [message]}).encode()
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens"])


def requests_of(name: str, wording: Wording, repeat: int) -> tuple[list[Any], int]:
    """The client's requests of a workload, and how many users there are."""
    from vllm.benchmarks.datasets import SampleRequest

    workload = NAMED[name]
    (stream,) = workload.streams
    assert isinstance(stream.arrival, Closed)
    asked = map(json.loads, bodies(workload, stream, wording, repeat, lambda _: None))
    return [
        SampleRequest(
            prompt="",
            prompt_len=1,
            expected_output_len=body["max_tokens"],
            chat_messages=body["messages"],
        )
        for body in asked
    ], stream.arrival.concurrency


async def run(url: str, model: str, requests: list[Any], users: int) -> dict[str, Any]:
    """What the client found."""
    from vllm.benchmarks import serve

    with contextlib.redirect_stdout(io.StringIO()):
        found: dict[str, Any] = await serve.benchmark(
            task_type=serve.TaskType.GENERATION,
            endpoint_type="openai-chat",
            api_url=f"{url}/v1/chat/completions",
            base_url=url,
            model_id=model,
            model_name=model,
            tokenizer=Words(),
            input_requests=requests,
            logprobs=None,
            request_rate=float("inf"),
            burstiness=1.0,
            disable_tqdm=True,
            num_warmups=0,
            profile=False,
            selected_percentile_metrics=["ttft", "tpot", "itl"],
            selected_percentiles=[50.0, 99.0],
            ignore_eos=True,
            goodput_config_dict={},
            max_concurrency=users,
            lora_modules=None,
            extra_headers=None,
            extra_body={"temperature": 0},
            ready_check_timeout_sec=0,
        )
    return found | {"failed": len(requests) - found["completed"]}


async def measure(args: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By workload and server what each repeat found, as far as the time went."""
    servers = dict(named.split("=", 1) for named in args.servers)
    until = time.monotonic() + args.seconds
    first = next(iter(servers.values()))
    low, high = (prompt_tokens(first, args.served_model_name, words) for words in (100, 500))
    wording = Wording(400 / (high - low))
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for repeat in range(args.repeats + 1):  # the first warms up
        for name in args.workload or WORKLOADS:
            requests, users = requests_of(name, wording, repeat)
            for server, url in servers.items():
                if time.monotonic() > until:
                    return found
                asked = requests if repeat else requests[:users]
                told = await run(url, args.served_model_name, asked, users)
                line = f"{repeat} {name} {server} {told['request_throughput']:.2f} req/s"
                print(f"{line}, {told['failed']} failed", file=sys.stderr, flush=True)
                if repeat:
                    found.setdefault((name, server), []).append(told)
    return found


def show(found: dict[tuple[str, str], list[dict[str, Any]]]) -> int:
    """The table; how many requests failed."""
    base: dict[str, dict[str, float]] = {}
    titles = [f"{title} (ratio; all)" for title in SHOWN.values()]
    print("|".join(("", "workload", "server", "runs", *titles, "failed", "")))
    for (name, server), told in found.items():
        medians = {key: statistics.median(one[key] for one in told) for key in SHOWN}
        first = base.setdefault(name, medians)
        cells = [
            f"{medians[key]:.4g} ({medians[key] / first[key]:.2f}; "
            f"{' '.join(f'{one[key]:.4g}' for one in told)})"
            for key in SHOWN
        ]
        failed = sum(one["failed"] for one in told)
        print("|".join(("", name, server, str(len(told)), *cells, str(failed), "")))
    return sum(one["failed"] for told in found.values() for one in told)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="ratios are to the first")
    parser.add_argument("--served-model-name", required=True, metavar="NAME")
    parser.add_argument(
        "--workload", action="append", choices=sorted(NAMED), help="may be repeated"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument(
        "--seconds", type=float, default=3600, metavar="S", help="begin no run later; default 3600"
    )
    return int(bool(show(asyncio.run(measure(parser.parse_args())))))


if __name__ == "__main__":
    sys.exit(main())
