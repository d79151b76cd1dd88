"""Models of true size, by their first layers: memory is as computed, and they are served."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from epd import tiny
from epd.config import EngineConfig
from epd.engine.device.memory_plan import held_nbytes
from epd.engine.factory import build_language
from epd.families.registry import family_of
from epd.model_files.checkpoint import read_config
from epd.model_files.config_sizes import Sizes, counted
from epd.model_files.first_layers import cut
from epd_lab.bench.costs import shape
from epd_lab.bench.costs.probe import PROBES, Probe
from tests.e2e.server import serving
from tests.e2e.streams import PATIENT, ask_during, questions

# One after another: their weights would not have room beside each other's.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.whole_gpu]
KV_NBYTES = 1 << 30
OF_EACH = pytest.mark.parametrize("one", PROBES, ids=lambda one: one.size)


@OF_EACH
def test_memory_is_as_computed(one: Probe, cuda: str, tmp_path: Path) -> None:
    """Within a hundredth, of parameters; what else is there for a small step is less than 1 GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    before_nbytes = torch.cuda.memory_allocated()
    whole = shape.write(tmp_path / one.size, tiny.CHECKPOINT, one.size)
    (tmp_path / "few").mkdir()
    directory = cut(whole, one.layers[0], tmp_path / "few")
    config = EngineConfig(
        device="cuda:0", dtype="bfloat16", load_format="dummy", quantization=one.quantization,
        cuda_graphs=False, kv_nbytes=KV_NBYTES, max_step_tokens=512,
    )  # fmt: skip
    engine = build_language(directory, config)
    described = read_config(directory)
    family = family_of(directory, described)
    counts = counted(family, Sizes(directory / "config.json", described, family))
    expected = counts.nbytes(2, one.quantization).language
    assert held_nbytes(engine.model) == pytest.approx(expected, rel=0.01)
    # Without captured graphs the KV pool has its memory from the first step on.
    taken = torch.cuda.memory_allocated() - before_nbytes
    assert 0.99 * expected < taken < expected + (1 << 30)


@OF_EACH
async def test_its_first_layers_are_served(one: Probe, cuda: str, tmp_path: Path) -> None:
    """A picture and a question through both stages; the answer is of no interest."""
    directory = shape.write(tmp_path / one.size, tiny.CHECKPOINT, one.size)
    flags = ("--layers", str(one.layers[0]), "--load-format", "dummy", "--kv-nbytes", "1GiB")
    eight = {"engine__quantization": one.quantization} if one.quantization else {}
    small = {"encode__cache_device_nbytes": 64 << 20, "encode__cache_host_nbytes": 64 << 20}
    with serving(
        "1epd", *flags, model=directory, engine__device="cuda", **small, **eight, **PATIENT
    ) as server:
        asked = questions(7, 2, side=400, num_tokens=8)
        replies = await ask_during(server, asked, lambda: None, None)
        assert [(reply.status, len(reply.tokens)) for reply in replies] == [(200, 8)] * 2
