"""An innocent client in a process of its own: `python -m tests.hostile.bystander URL`.

It asks for two words again and again, and for /health, and prints one JSON object when its standard
input ends: the longest waits in seconds, how many there were, and what was not answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

EVERY_S = 0.05
BODY = {"prompt": "Say it", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
TIMEOUT_S = 120.0


async def _watch(url: str) -> dict[str, Any]:
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    waits: dict[str, list[float]] = {"words": [], "health": []}
    failures: list[str] = []

    async def repeat(name: str) -> None:
        while not ended.done():
            began_s = time.monotonic()
            try:
                if name == "health":
                    request = session.get(f"{url}/health")
                else:
                    request = session.post(f"{url}/v1/completions", json=BODY)
                async with request as response:
                    text = await response.text()
                if response.status != 200:
                    failures.append(f"{name}: {response.status} {text[:200]}")
            except (TimeoutError, aiohttp.ClientError) as error:
                failures.append(f"{name}: {error!r}")
            waits[name].append(time.monotonic() - began_s)
            await asyncio.sleep(EVERY_S)

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(repeat("words"), repeat("health"))
    found: dict[str, Any] = {"failures": failures[:5], "num_failures": len(failures)}
    for name, times in waits.items():
        times.sort()
        found[name] = {
            "count": len(times),
            "p50_s": round(times[len(times) // 2], 4),
            "p99_s": round(times[-1 - len(times) // 100], 4),
            "max_s": round(times[-1], 4),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_watch(sys.argv[1]))))
