"""Embedding rows in host memory that go to the device when they arrive, ahead of their step.

The copy is queued on the launch thread, so it is there before each step that reads it; the step's
kernels wait for it alone.  Its target is a piece of an arena.  A request that reads the rows keeps
the piece, and so does the copy until the device has passed it: cancelling frees no memory that is
still written.  Where the arena is full, rows stay where they are and go up with their step."""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from epd.engine.base import Buffer, EngineError
from epd.engine.device.executor import Deferred, DeviceExecutor
from epd.engine.device.memory_plan import LIFTED_NBYTES
from epd.engine.device.pinned import Arena
from epd.engine.device.row_memory import read_bytes
from epd.engine.device.streams import LIFT
from epd.engine.language.row_splice import LiftedRows
from epd.messages import RowContract

if TYPE_CHECKING:
    from epd.engine.device.streams import DeviceStreams

logger = logging.getLogger(__name__)


class RowLift:
    def __init__(
        self,
        contract: RowContract,
        dtype: torch.dtype,
        executor: DeviceExecutor,
        streams: DeviceStreams,
        pool_nbytes: int,
    ) -> None:
        """`pool_nbytes`: of the memory in which rows arrive."""
        self._contract = contract
        self._dtype = dtype
        self._executor = executor
        self._streams = streams
        self.arena = Arena(min(LIFTED_NBYTES, pool_nbytes), streams.device)

    def __call__(self, views: Sequence[Buffer]) -> Sequence[Buffer] | LiftedRows:
        """Begin; gives what a step reads."""
        row_nbytes = self._contract.row_nbytes
        if any(hasattr(view, "__cuda_array_interface__") for view in views):
            return views  # they have arrived on the device
        if any(view.nbytes % row_nbytes for view in views):
            return views  # a step's check will refuse them
        num_rows = sum(view.nbytes for view in views) // row_nbytes
        tensor = self.arena.take(torch.Size((num_rows, self._contract.row_width)), self._dtype)
        if tensor is None:
            return views
        lifted = LiftedRows(views)
        lifted.tensor = tensor
        try:
            copy: Future[None] = self._executor.launch_brief(self._launch, lifted)
        except EngineError:  # so many calls wait that the step's own will fail, too
            return views
        copy.add_done_callback(_log_failure)
        return lifted

    def _launch(self, lifted: LiftedRows) -> Deferred[None]:
        pieces = [read_bytes(view).view(self._dtype) for view in lifted]
        lifted.passed = self._streams.lift(lifted.tensor.view(-1), pieces)
        return Deferred(lambda: None, LIFT)


def _log_failure(copy: Future[None]) -> None:
    """The step that reads these rows meets a fault of the device itself."""
    if not copy.cancelled() and (error := copy.exception()) is not None:
        logger.warning("rows go up with their step: %s", error)
