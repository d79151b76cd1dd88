"""The encoder cache connector that vLLM loads by name: rows of our encoders in its cache.

    vllm serve MODEL --enable-scale-out --ec-transfer-config '{"ec_connector": "EpdECConnector",
      "ec_connector_module_path": "epd.vllm.connector", "ec_role": "ec_consumer",
      "ec_connector_extra_config": {"url": "http://127.0.0.1:8100"}}'

The scheduler's object owns the instance (`instance.py`) and makes promises (`halves.py`). A
worker's object puts rows into the engine's cache.  Nothing else of this project imports vLLM.

"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from epd.config import ConfigError
from epd.transport.nixl.library import with_pause
from epd.vllm.halves import SchedulerHalf, load
from epd.vllm.instance import InstanceThread, ServerEngine, contract_of, plan
from epd.vllm.server import EngineServer, Grid
from epd.vllm.shelf import Shelf
from epd.vllm.tickets import LAYOUT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from epd.layouts import KvLayout

PREFILL_AND_DECODE = ("prefill", "decode")
logger = logging.getLogger(__name__)


class Extra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `ec_connector_extra_config` may have."""

    url: str  # of this very server
    run: str = ""  # flags of `epd run` for the instance: --port or --join, --transport, ...
    defer_s: float = 30.0  # that a request waits for rows that are on their way
    fetch_s: float = 10.0  # that a request waits for KV that another server has
    encodes: bool = False  # whether pictures without rows are the engine's own work
    model: str = ""  # as encoders and gateway read it, if not from the same directory


class Orders(ECConnectorMetadata):
    """For the workers, of one step: rows by identifier."""

    def __init__(self, rows: dict[str, torch.Tensor]) -> None:
        self.rows = rows


class EpdECConnector(ECConnectorBase):
    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        extra = _checked(vllm_config)
        self._half: SchedulerHalf | None = None
        self._thread: InstanceThread | None = None
        self._held = ExitStack()
        if role is ECConnectorRole.WORKER and kv_layout_of(vllm_config) is not None:
            let_nixl_wait(self._held)
        if role is ECConnectorRole.SCHEDULER:
            self._begin(vllm_config, extra)

    def _begin(self, vllm_config: VllmConfig, extra: Extra) -> None:
        model = vllm_config.model_config
        directory = extra.model or model.model
        dtype = str(model.dtype).removeprefix("torch.")
        config = plan(extra.run, directory, dtype)
        contract, layout = contract_of(config), kv_layout_of(vllm_config)
        if layout is None and config.roles != PREFILL_AND_DECODE:
            raise ConfigError(
                f"roles {'+'.join(config.roles)}: KV moves from server to server by vLLM's "
                "NixlConnector, so give --kv-transfer-config as `epd run --for vllm` prints it"
            )
        guides = vllm_config.structured_outputs_config.backend == "guidance"
        shelf, server = Shelf(contract), EngineServer(extra.url, encode_grid, guides=guides)
        engine = ServerEngine(contract, model.max_model_len, shelf, server, layout)
        patience = extra.defer_s, extra.fetch_s
        self._half = SchedulerHalf(shelf, time.monotonic, *patience, encodes=extra.encodes)
        self._thread = InstanceThread(config, engine)

    @property
    def half(self) -> SchedulerHalf:
        assert self._half is not None  # or it is a worker's
        return self._half

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.close()

    # --- the scheduler's --------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        return self.half.has(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self.half.ensure(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.half.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        if (meta := scheduler_output.kv_connector_metadata) is not None:
            begun, absent = fetches_of(meta)
            for request_id in self.half.fetch(begun, absent):
                logger.warning("its KV has not come from another server: request %s", request_id)
        return Orders(self.half.orders())

    def take_unavailable_requests(self) -> set[str]:
        return self.half.take_lost()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, object] | None]:
        self.half.finished(request.request_id)
        return False, None

    # --- a worker's -------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        from vllm.platforms import current_platform

        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        load(orders.rows, encoder_cache, torch.device(current_platform.device_type))

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object
    ) -> None:
        """It is no producer."""


def encode_grid(grid: Grid) -> str:
    """A picture's metadata as `/inference/v1/generate` reads it: `image_grid_thw`, no pixels."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    field = MultiModalBatchedField(keep_on_cpu=True)
    element = MultiModalFieldElem(data=torch.tensor(grid), field=field)
    encoded: str = encode_mm_kwargs_item(MultiModalKwargsItem({"image_grid_thw": element}))
    return encoded


def fetches_of(meta: object) -> tuple[dict[str, str], frozenset[str]]:
    """By a NixlConnector, in one step: those that begin, each with its name at the other server;
    and names of what has not come, which it shows now and then.  What is cached has no blocks."""
    begun = getattr(meta, "reqs_to_recv", {})
    shown = getattr(meta, "heartbeat_by_engine", {})
    absent = frozenset(name for of_engine in shown.values() for name in of_engine.req_ids)
    waiting = {key: one for key, one in begun.items() if any(one.local_block_ids)}
    return {key: one.remote.request_id for key, one in waiting.items()}, absent


def kv_layout_of(vllm_config: VllmConfig) -> KvLayout | None:
    """None: KV stays where it is computed."""
    transfer = vllm_config.kv_transfer_config
    is_moved = transfer is not None and transfer.kv_connector == "NixlConnector"
    return LAYOUT if is_moved else None


def let_nixl_wait(held: ExitStack) -> None:
    """Its thread polls without a pause.  On a CPU it takes a core that the model needs."""
    from vllm.distributed.nixl_utils import NixlWrapper
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and NixlWrapper is not None:
        held.enter_context(with_pause(sys.modules[NixlWrapper.__module__]))


def _checked(vllm_config: VllmConfig) -> Extra:
    """The extra configuration.  Raises ConfigError where this connector cannot serve."""
    if not hasattr(ECConnectorBase, "take_unavailable_requests"):
        raise ConfigError(
            "EpdECConnector needs vLLM 0.30 or later: an earlier one cannot fail one request "
            "alone, so rows that do not come would end its engine"
        )
    transfer, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
    if transfer.ec_role != "ec_consumer":
        raise ConfigError(
            f"ec_role is {transfer.ec_role!r}: encoders here are `epd run --role encode --for "
            "vllm`, so write ec_consumer"
        )
    try:
        extra = msgspec.convert(transfer.ec_connector_extra_config or {}, Extra)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"ec_connector_extra_config: {error}; `url` is the address of this server, "
            "http://127.0.0.1:PORT with the port of `vllm serve`"
        ) from None
    if parallel.data_parallel_size > 1:
        raise ConfigError("one instance has one engine: drop --data-parallel-size, start several")
    return extra
