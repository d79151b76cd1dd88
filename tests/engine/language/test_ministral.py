"""Behind Pixtral: language models whose queries grow with their position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from epd.engine.factory import build_executor, build_language
from epd.families.mistral3.adapter import GrowingQueries
from tests.engine.conftest import CONFIG, chat, drawn_image
from tests.engine.driver import Driver
from tests.engine.language.test_decoder import fuse
from tests.engine.reference import reference_generate, reference_logits

LONG = (chat("a text of more than the thirty-two tokens that it began with"), [])
SEEN = (chat((2, "compare")), [drawn_image(3, 33, 47), drawn_image(4, 90, 50)])


@pytest.mark.parametrize(
    ("family", "fused"), [("ministral3", True), ("ministral3", False), ("mistral4", True)]
)
async def test_it_equals_generate_in_any_chunks(
    family: str,
    fused: bool,
    driver: Callable[[str], Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = driver(family)
    language = build_language(plain.model_dir, CONFIG, build_executor(CONFIG))
    serving = Driver(plain.model_dir, plain.vision, language)
    if fused:
        serving.language.forward = fuse(serving.language)
    golden = [reference_generate(serving.model_dir, *case, 10) for case in (LONG, SEEN)]
    for chunk in (7, 4096):
        requests = [
            await serving.request(str(i), *case, max_tokens=10)
            for i, case in enumerate((LONG, SEEN))
        ]
        assert await serving.run(requests, chunk) == golden, f"chunks of {chunk}"
        serving.release(requests)
    if fused:  # the comparison can fail
        monkeypatch.setattr(GrowingQueries, "scaled", lambda self, query, step: query)
        request = await serving.request("r", *LONG)
        found = serving.language.logits([request.next_step(4096)])[0]
        assert (found - reference_logits(serving.model_dir, *LONG)).abs().max() > 1e-3


async def test_the_tower_makes_no_mask_of_all_patches_by_all_patches(
    driver: Callable[[str], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.pixtral import modeling_pixtral as theirs

    def fail(*_: Any) -> torch.Tensor:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(theirs, "generate_block_attention_mask", fail)
    request = await driver("mistral3").request("r", *SEEN)
    assert len(request.rows) == 2
