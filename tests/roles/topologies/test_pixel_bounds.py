"""Images resized between the bounds of a request: answers are those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from epd.api.openai.validation import read_chat
from epd.config import Limits
from epd.frontend import Generation
from epd.tiny import CHECKPOINT
from tests.e2e.client import image_part, png
from tests.engine.conftest import drawn_image
from tests.roles.topologies.golden import answer, ask, assert_exact, preparer
from tests.roles.topologies.test_exactness import serving, shared

__all__ = ["shared"]  # a fixture


@pytest.mark.parametrize("topology", ["1e1p1d", pytest.param("1epd", marks=pytest.mark.long)])
async def test_answers_under_other_bounds(
    topology: str, shared: dict[str, Any], tmp_path: Path
) -> None:
    """The reference has the bounds in its settings, the request in its parameters; both at once
    with the same image under the model's own."""
    other = tmp_path / "model"
    shutil.copytree(CHECKPOINT, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 8192, "longest_edge": 16384}
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    image = drawn_image(3, 240, 200)
    expected = await ask([(1, "what?")], [image], model_dir=other)
    plain = await ask([(1, "what?")], [image])
    content = [image_part(png(image)), {"type": "text", "text": "what?"}]
    bounds = {"min_pixels": 8192, "max_pixels": 16384}
    body = {"messages": [{"role": "user", "content": content}], "mm_processor_kwargs": bounds}
    asked = read_chat(body, preparer(), Limits())
    prompt = await preparer().chat(asked.messages or ())
    assert prompt.token_ids == expected.generation.token_ids != plain.generation.token_ids
    sampling = expected.generation.sampling
    generation = Generation(prompt.token_ids, prompt.items, sampling)
    object.__setattr__(expected, "generation", generation)
    async with serving(shared, topology) as cluster:
        for _ in range(2):
            assert_exact(await answer(cluster.gateway, plain), plain)
            assert_exact(await answer(cluster.gateway, expected), expected)
