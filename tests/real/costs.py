"""What fewer bits cost: perplexity of a text, by what a server says of its tokens.

    python -m tests.real.costs [FLAG...]    prints a table; flags are epd run's: --device cuda

The text (text.txt) was written for this test, so no model has learned it.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from pathlib import Path

from tests.e2e.client import in_session, post
from tests.e2e.server import Server, serving
from tests.engine.reference import tokenizer
from tests.real import generated
from tests.real.checkpoint import Unavailable, make
from tests.real.quantised import WAYS, stored

TEXT = Path(__file__).with_name("text.txt").read_text()
HALF = ("--dtype", "bfloat16")
KINDS: dict[str, tuple[str, ...]] = {
    "float32": ("--dtype", "float32"),
    "bfloat16": HALF,
    "--quantization fp8": (*HALF, "--quantization", "fp8"),
    "--kv-cache-dtype fp8": (*HALF, "--kv-cache-dtype", "fp8"),
    **dict.fromkeys(WAYS, HALF),
}


def text_ids(model_dir: Path) -> list[int]:
    return list(tokenizer(model_dir).encode(TEXT, add_special_tokens=False).ids)


async def perplexity(server: Server, token_ids: list[int]) -> float:
    """Of a text, from its second token on."""
    body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    reply = await in_session(
        lambda session: post(session, server.base_url, body, "/v1/completions")
    )
    assert reply.status == 200, reply.body
    first, *told = reply.body["choices"][0]["prompt_logprobs"]
    assert first is None and len(told) == len(token_ids) - 1
    pairs = zip(told, token_ids[1:], strict=True)
    logprobs = [entry[str(token_id)]["logprob"] for entry, token_id in pairs]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


async def cost(kind: str, model_dir: Path, *flags: str) -> float:
    """The perplexity in numbers of this kind."""
    ids = text_ids(model_dir)
    with tempfile.TemporaryDirectory(prefix="epd-smollm2-") as directory:
        if kind in WAYS:
            model_dir = stored(kind, model_dir, Path(directory) / "m")
        with serving("1pd", *KINDS[kind], *flags, model=model_dir) as server:
            return await perplexity(server, ids)


async def main(*flags: str) -> None:
    model_dir = make()
    plain = generated.perplexity(model_dir, text_ids(model_dir))
    print(f"{'float32, transformers':26} {plain:8.4f}")
    for kind in KINDS:
        found = await cost(kind, model_dir, *flags)
        print(f"{kind:26} {found:8.4f}  {found / plain - 1:+.2%}", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except Unavailable as error:
        sys.exit(str(error))
