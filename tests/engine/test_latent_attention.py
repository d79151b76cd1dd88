"""Latent attention, beyond what the tests of all families show of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epd.engine import latent_attention
from tests.engine.conftest import chat
from tests.engine.driver import Driver


async def test_heads_take_turns_over_a_long_history(
    driver: Callable[[str], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is expanded at once does not change what is attended to."""
    serving = driver("kimi_k25")
    request = await serving.request("r", chat("a text that fills more than one block"))
    await serving.step([request], 20)
    step = request.next_step(4096)
    whole = serving.language.logits([step])
    monkeypatch.setattr(latent_attention, "EXPANDED_NBYTES", 1)
    in_turns = serving.language.logits([step])
    serving.release([request])
    torch.testing.assert_close(in_turns, whole, atol=1e-5, rtol=0)
