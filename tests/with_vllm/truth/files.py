"""Rows of pictures that lie in files since an earlier life, and what happens to those files."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from epd_lab.bench.chaos.process import READY_S, wait_for
from epd_lab.bench.truth.client import Peer, TruthCell, picture
from epd_lab.bench.truth.cluster import Skipped
from epd_lab.bench.truth.ours import OurCluster
from epd_lab.bench.truth.rows import SAYS, Row, counted, painted, then

NAME = "*/encoder_cache.safetensors"  # vLLM's, and this project's
LEFT = dict(zip(("removed", "swapped", "stale", "cut", "other"), painted(5, 48), strict=True))


class RowFiles:
    """Of one column, by what they are for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.by_kind: dict[str, Path] = {}

    async def left_by(self, url: str, kinds: Sequence[str]) -> None:
        """That server is asked, and a file appears for each picture."""
        peer = Peer("earlier", url, READY_S)
        await peer.open()
        for kind in kinds:
            before = self._files()
            reply = await peer.ask(SAYS, [picture(LEFT[kind][1])])
            assert reply.status == 200, reply
            new: Any = await asyncio.to_thread(
                wait_for, lambda b=before: self._files() - b, READY_S, "rows are in a file"
            )
            (self.by_kind[kind],) = new
        await peer.close()

    def _files(self) -> set[Path]:
        return set(self.directory.glob(NAME))


def another_checkpoint(model: Path, directory: Path) -> Path:
    """A copy whose tower differs, and nothing else."""
    copy = shutil.copytree(model, directory / "other")
    tensors = load_file(copy / "model.safetensors")
    found = {name: -one if "merger" in name else one for name, one in tensors.items()}
    save_file(found, copy / "model.safetensors", {"format": "pt"})
    return copy


async def leave_rows(files: RowFiles, cluster: OurCluster, model: Path) -> None:
    """By an earlier life of this project, and by one of another checkpoint."""
    other = another_checkpoint(model, files.directory.parent)
    own = [kind for kind in LEFT if kind != "stale"]
    for read, kinds in ((model, own), (other, ["stale"])):
        kept = ("--encoder-cache-dir", str(files.directory))
        earlier = cluster.serving("1e1pd", *kept, model=read).wait_ready()
        await files.left_by(earlier.base_url, kinds)
        earlier.stop()


def changed(kind: str) -> Row:
    """Right is the picture's own answer: from its file, or encoded anew."""
    text, url = LEFT[kind]

    async def row(peer: Peer) -> TruthCell:
        files: RowFiles | None = getattr(peer.cluster, "files", None)
        if files is None:
            raise Skipped("its files are not known")
        file = files.by_kind[kind]
        if kind == "removed":
            file.unlink()
        elif kind == "swapped":
            shutil.copyfile(files.by_kind["other"], file)
        elif kind == "cut":
            os.truncate(file, file.stat().st_size // 2)
        return await then(peer, await counted((peer.ask(SAYS, [picture(url)]), text)))

    return row
