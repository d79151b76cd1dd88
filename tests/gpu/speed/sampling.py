"""What choosing tokens costs beside a step, by what requests ask for.

`python -m tests.gpu.speed.sampling`, on a CUDA device: milliseconds for 64 rows (and one row) of
151,936 logits, of the device, and of the host that queues them.  Each prompt has 2,000 tokens, each
answer 256, whose last one is on its way.
"""

from __future__ import annotations

import time
from array import array
from typing import Any

import torch

from epd.engine.language.logit_rules import SampleRequest
from epd.engine.language.sampler import Draft
from epd.messages import SamplingParams

VOCABULARY = 151936
WISHES = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "Qwen's defaults (0.7, top_p 0.8, top_k 20)": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "top_p 0.9 alone": {"temperature": 1.0, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "greedy, 5 log-probabilities": {"num_logprobs": 5},
    "repetition penalty 1.1": {"repetition_penalty": 1.1},
    "frequency and presence penalties": {"frequency_penalty": 0.2, "presence_penalty": 0.1},
    "300 biases": {"logit_bias": tuple((token, 1.0) for token in range(300))},
    "a mask": {"allowed_token_ids": tuple(range(1000))},
}
PROMPT, ANSWER = tuple(range(2000)), array("i", range(1000, 1256))  # that penalties look at
RUNS = 20


def device_ms(rows: int, wish: dict[str, Any]) -> tuple[float, float]:
    """Of the device, and of the host, which queues it."""
    logits = torch.randn(rows, VOCABULARY, device="cuda") * 3
    params = SamplingParams(max_tokens=9, **wish)
    sampled = torch.arange(rows, device="cuda")
    requests = [
        SampleRequest(params, index, PROMPT, ANSWER, pending=index) for index in range(rows)
    ]
    times_ms, host_ms = [], []
    for _ in range(RUNS):
        torch.cuda._sleep(40_000_000)  # the host queues all of it meanwhile
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        started = time.perf_counter()
        Draft(logits, requests, sampled)
        host_ms.append(1e3 * (time.perf_counter() - started))
        ended.record()
        torch.cuda.synchronize()
        times_ms.append(began.elapsed_time(ended))
    return sorted(times_ms)[RUNS // 2], sorted(host_ms)[RUNS // 2]


def main() -> None:
    print(f"{'':45} {'64 rows':>9} {'host':>7} {'1 row':>9} {'host':>7}  ms on", end=" ")
    print(torch.cuda.get_device_name())
    for name, wish in WISHES.items():
        many, one = device_ms(64, wish), device_ms(1, wish)
        print(f"{name:45} {many[0]:9.3f} {many[1]:7.3f} {one[0]:9.3f} {one[1]:7.3f}")


if __name__ == "__main__":
    main()
