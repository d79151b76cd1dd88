"""The connector against vLLM's own base class, and the signatures that it was written for."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from epd.config import ConfigError
from epd.vllm.command import transfer_config
from epd.vllm.connector import EpdECConnector, encode_grid, fetches_of

# Of vLLM 0.30 to 0.33: parameters behind `self` of what the connector implements, or relies on.
SIGNATURES = {
    "__init__": ["vllm_config", "role"],
    "has_cache_item": ["identifier"],
    "ensure_cache_available": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "index"],
    "build_connector_meta": ["scheduler_output"],
    "take_unavailable_requests": [],
    "request_finished": ["request"],
    "start_load_caches": ["encoder_cache", "kwargs"],
    "save_caches": ["encoder_cache", "mm_hash", "kwargs"],
    "bind_connector_metadata": ["connector_metadata"],
    "shutdown": [],
}
URL = "http://127.0.0.1:1"


def configured(**other: Any) -> Any:
    """A configuration of vLLM, as far as a worker's connector reads it."""
    given = transfer_config(URL, "")
    transfer = {
        "ec_role": "ec_consumer",
        "is_ec_producer": False,
        "is_ec_consumer": True,
        "ec_connector": given["ec_connector"],
        "ec_connector_module_path": given["ec_connector_module_path"],
        "ec_connector_extra_config": given["ec_connector_extra_config"],
        "engine_id": "engine",
        **other,
    }
    parallel = SimpleNamespace(data_parallel_size=other.pop("data_parallel_size", 1))
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(**transfer),
        kv_transfer_config=None,
        parallel_config=parallel,
    )


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_that_it_was_written_for(name: str) -> None:
    for cls in (ECConnectorBase, EpdECConnector):
        _, *parameters = inspect.signature(getattr(cls, name)).parameters
        assert parameters == SIGNATURES[name]


def test_nothing_abstract_is_left() -> None:
    """A version that asks for more is noticed here."""
    assert not inspect.isabstract(EpdECConnector)


def test_the_factory_finds_it_by_what_is_printed() -> None:
    made = ECConnectorFactory.create_connector(configured(), ECConnectorRole.WORKER)
    assert isinstance(made, EpdECConnector) and made.is_consumer


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"ec_role": "ec_producer"}, "ec_consumer"),
        ({"ec_role": "ec_both"}, "ec_consumer"),
        ({"ec_connector_extra_config": {}}, "`url`"),
        ({"ec_connector_extra_config": {"url": URL, "urls": 1}}, "`urls`"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_a_sentence(other: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EpdECConnector(configured(**other), ECConnectorRole.WORKER)


def test_a_version_without_failures_of_one_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.28 and 0.29."""
    monkeypatch.delattr(ECConnectorBase, "take_unavailable_requests")
    with pytest.raises(ConfigError, match=r"0\.30 or later"):
        EpdECConnector(configured(), ECConnectorRole.WORKER)


def test_a_grid_is_read_back_by_vllms_own_reader() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    item = decode_mm_kwargs_item(encode_grid((1, 8, 12)))
    assert item["image_grid_thw"].data.tolist() == [1, 8, 12] and list(item) == ["image_grid_thw"]


def test_fetches_of_kv_are_read_as_the_nixl_connector_shows_them() -> None:
    """Its own metadata of a step: a version that shows them in another way is noticed here."""
    pytest.importorskip("nixl", reason="KV moves by nixl")
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        HeartbeatInfo,
        NixlConnectorMetadata,
    )

    meta = NixlConnectorMetadata()
    params = {"remote_block_ids": [[1]], "remote_engine_id": "p", "remote_host": "h"}
    for key, blocks in (("r", ([4],)), ("cached", ())):
        ticket = params | {"remote_request_id": f"kv-{key}", "remote_port": 1, "tp_size": 1}
        meta.add_new_req_to_recv(key, blocks, ticket)
    assert fetches_of(meta) == ({"r": "kv-r"}, frozenset())
    meta.heartbeat_by_engine = {"p": HeartbeatInfo({"kv-r", "kv-s"}, "h", 1, 1)}
    assert fetches_of(meta)[1] == {"kv-r", "kv-s"}
