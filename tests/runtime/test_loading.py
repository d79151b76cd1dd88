"""What an instance's engines take of its settings."""

from __future__ import annotations

import pytest

from epd.config import EngineConfig, InstanceConfig, Limits
from epd.errors import MediaError
from epd.runtime.loading import load_engines
from epd.tiny import CHECKPOINT
from tests.engine.conftest import drawn_image
from tests.engine.driver import png


async def test_an_encoder_has_the_limit_of_its_gateway() -> None:
    config = InstanceConfig(
        instance_id="e0",
        roles=("encode",),
        model_dir=str(CHECKPOINT),
        engine=EngineConfig(threads=1),
        limits=Limits(max_pixels=1000),
    )
    engines = load_engines(config)
    assert engines.vision is not None
    with pytest.raises(MediaError, match="40 x 30 pixels; send at most 1000"):
        await engines.vision.preprocess(png(drawn_image(1, 40, 30)), (1, 2, 2))
    await engines.close()
