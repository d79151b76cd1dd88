"""What choosing tokens costs beside a step, by what requests ask for.

`python -m tests.gpu.sampling_speed`, on a CUDA device: milliseconds of the device for 64 rows (and
one row) of 151,936 logits.
"""

from __future__ import annotations

import torch

from epd.engine.sampler import Draft, SampleRequest
from epd.messages import SamplingParams

VOCABULARY = 151936
WISHES = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "Qwen's defaults (0.7, top_p 0.8, top_k 20)": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "top_p 0.9 alone": {"temperature": 1.0, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "greedy, 5 log-probabilities": {"num_logprobs": 5},
}
RUNS = 20


def device_ms(rows: int, wish: dict[str, float]) -> float:
    logits = torch.randn(rows, VOCABULARY, device="cuda") * 3
    params = SamplingParams(max_tokens=9, **wish)
    requests = [SampleRequest(params, index) for index in range(rows)]
    times_ms = []
    for _ in range(RUNS):
        torch.cuda._sleep(20_000_000)  # the host queues all of it meanwhile
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        Draft(logits, requests)
        ended.record()
        torch.cuda.synchronize()
        times_ms.append(began.elapsed_time(ended))
    return sorted(times_ms)[RUNS // 2]


def main() -> None:
    print(f"{'':45} {'64 rows':>9} {'1 row':>9}  ms on {torch.cuda.get_device_name()}")
    for name, wish in WISHES.items():
        print(f"{name:45} {device_ms(64, wish):9.3f} {device_ms(1, wish):9.3f}")


if __name__ == "__main__":
    main()
