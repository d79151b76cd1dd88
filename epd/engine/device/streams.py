"""The streams of one CUDA device and the one rule that orders them.

Theory of operation
-------------------
Kernels run on the *compute* stream in the order in which the launch thread queued them.  What is
large moves beside them: host to device on *upload*, device to host on *download*.  The rule:

    A copy waits for what was launched before it; a later launch that touches its target waits for
    it.

So a download waits for the kernels that fill its source (fault F2), which is not given out again
before the copy has passed.  An upload's target is fresh memory, and compute waits for the upload
before the first kernel that reads it (faults F23, F28).  Rows that go up ahead of their step have a
stream of their own (`LIFT`), so that no upload waits for them.  A download is over, for the host,
when an event of *its* stream has passed: the call that queued it returns a `Deferred` with the lane
`DOWNLOAD`.

Rows stay in an arena on the device (`rows`).  The source of moves between it and pinned memory is
final for the host.  So they need no launch thread: any thread that may wait queues them on
`tier_stream`.

KV that is sent while later layers of its step are computed must not wait for them, nor behind a
download that does.  It is final for the host, which has seen the event behind it, so it waits for
nothing and has a stream of its own (`KV_OUT`).  So has KV that has arrived (`KV_IN`), which would
else wait for two steps.  No launched kernel uses its blocks: their former owner returned them
behind the end of its last step, and the next one decodes after the host has seen them filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.engine.device.pinned import Arena

DOWNLOAD = "download"
KV_OUT = "kv-out"
KV_IN = "kv-in"
LIFT = "lift"


class DeviceStreams:
    """Compute is the stream that is current where this is made and on the launch thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.upload_stream = torch.cuda.Stream(device)
        self.lift_stream = torch.cuda.Stream(device)
        self.download_stream = torch.cuda.Stream(device)
        self.kv_out_stream = torch.cuda.Stream(device)
        self.kv_in_stream = torch.cuda.Stream(device)
        self.tier_stream = torch.cuda.Stream(device)
        self.arena = Arena(0)  # of what comes down; torch's own allocator where it is full
        self.rows = Arena(0, device)  # of what stays up

    @property
    def lanes(self) -> dict[str, torch.cuda.Stream]:
        """By the name that a `Deferred` has of where it is over."""
        return {
            DOWNLOAD: self.download_stream,
            KV_OUT: self.kv_out_stream,
            KV_IN: self.kv_in_stream,
            LIFT: self.lift_stream,
        }

    def works(self) -> bool:
        """Whether the device still takes work: after a sticky error even a question fails."""
        try:
            torch.cuda.current_stream(self.device).query()
        except RuntimeError:
            return False
        return True

    def wait(self) -> None:
        """Until all that is queued has passed, on every stream."""
        torch.cuda.synchronize(self.device)

    def upload(self, *pieces: torch.Tensor) -> torch.Tensor:
        """Pinned host memory to fresh device memory; kernels launched from now on may read it.

        `pieces` become one tensor, one behind the other in their first dimension.  They must not
        change before these kernels have run.  The copies wait for no kernel.
        """
        compute = torch.cuda.current_stream(self.device)
        shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
        with torch.cuda.stream(self.upload_stream):
            tensor = torch.empty(shape, dtype=pieces[0].dtype, device=self.device)
            _fill(tensor, pieces)
        compute.wait_stream(self.upload_stream)
        tensor.record_stream(compute)
        return tensor

    def lift(self, target: torch.Tensor, pieces: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """As `upload`, into memory that no kernel uses, and no upload waits for it: for kernels
        that wait for the event, and the host behind the lane LIFT."""
        with torch.cuda.stream(self.lift_stream):
            _fill(target, pieces)
            passed = torch.cuda.Event()
            passed.record()
        return passed

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory of what the kernels launched so far leave in `tensor`.

        It may be read behind the lane DOWNLOAD; kernels that wait for that lane may overwrite
        `tensor`."""
        host = self.arena.pinned_like(tensor)
        self.download_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.download_stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.download_stream)
        return host

    def stay(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy in the arena on the device, made by the current stream; None: it is full."""
        kept = self.rows.take(tensor.shape, tensor.dtype)
        return kept if kept is None else kept.copy_(tensor)

    def moved_down(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory of what is final in the device's.  Waits; from any thread."""
        return self._moved(tensor, self.arena.pinned_like(tensor))

    def moved_up(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy in the arena on the device; None: it is full.  Waits; from any thread."""
        kept = self.rows.take(tensor.shape, tensor.dtype)
        if kept is None:
            return None
        # A call that failed may have left a kernel behind that still writes where this goes.
        self.tier_stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._moved(tensor, kept)

    def _moved(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        passed = torch.cuda.Event(blocking=True)
        with torch.inference_mode(), torch.cuda.stream(self.tier_stream):
            target.copy_(source, non_blocking=True)
            passed.record()
        passed.synchronize()
        return target


def _fill(target: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """With copies on the stream that is current, one behind the other."""
    for part, piece in zip(target.split([len(p) for p in pieces]), pieces, strict=True):
        part.copy_(piece, non_blocking=True)
