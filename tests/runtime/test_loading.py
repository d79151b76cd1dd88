"""What an instance's engines take of its settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from epd.config import EncodeConfig, EngineConfig, InstanceConfig, Limits
from epd.engine import factory
from epd.engine.base import no_progress
from epd.engine.factory import build_executor
from epd.engine.sharding import WHOLE
from epd.engine.vision.engine import TorchVisionEngine
from epd.errors import MediaError
from epd.runtime import loading
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


@pytest.mark.parametrize(
    ("who", "roles", "takes"),
    [
        ("auto", ("encode",), True),
        ("auto", ("encode", "prefill"), False),  # whose steps a decoder's start would hold up
        ("nvdec", ("encode", "prefill"), True),
        ("cpu", ("encode",), False),
    ],
)
def test_who_decodes_films(
    who: Literal["auto", "cpu", "nvdec"],
    roles: tuple[str, ...],
    takes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(TorchVisionEngine, "take_films", lambda _, nbytes: taken.append(nbytes))
    config = InstanceConfig(
        instance_id="e0",
        roles=roles,
        model_dir=str(CHECKPOINT),
        engine=EngineConfig(threads=1),
        encode=EncodeConfig(film_decoder=who, film_device_nbytes=77),
    )
    loading.load_rank(config, build_executor(config.engine), WHOLE)
    assert taken == [77 * takes]


async def test_weights_that_both_role_sets_need_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What former roles needed stays until it is forgotten; each life has a pool of its own."""
    config = InstanceConfig(
        instance_id="d0",
        roles=("decode",),
        model_dir=str(CHECKPOINT),
        engine=EngineConfig(threads=1),
    )
    read: list[str] = []
    load = factory.load_stage
    monkeypatch.setattr(factory, "load_stage", lambda *a, **k: read.append(a[1]) or load(*a, **k))
    engines = load_engines(config)
    first: Any = engines.language
    pool = first.pool
    for roles, stages in (
        (("encode", "prefill"), ["vision"]),
        (("prefill", "decode"), []),
        (("encode",), []),
        (("decode",), ["language"]),
    ):
        read.clear()
        assert engines.anew is not None
        engines = await engines.anew(msgspec.structs.replace(config, roles=roles))
        assert read == stages
        assert (engines.vision is not None) == ("encode" in roles)
        language: Any = engines.language
        if roles == ("prefill", "decode"):
            assert language.model is first.model and language.pool is not pool
        if roles == ("encode",):
            assert engines.forget is not None
            engines.forget()  # the language model
    assert engines.close is not None
    await engines.close()


def test_the_kv_pool_leaves_memory_for_films(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*_: Any, later_nbytes: Callable[[int], int], **__: Any) -> int:
        return later_nbytes(4096)

    monkeypatch.setattr(factory, "build_language", planned)
    config = InstanceConfig(instance_id="epd0", roles=("encode", "prefill", "decode"))
    load = partial(loading._load_language, config, None, WHOLE, no_progress)  # type: ignore[arg-type]
    assert load(SimpleNamespace(films_nbytes=1000)) - load(None) == 1000  # type: ignore[arg-type, operator]
