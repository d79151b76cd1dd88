"""What a plan is asked about that a cost file does not hold for is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from epd.cli.configure.hub import find_model
from epd.cli.scratch import scratch
from epd.config import ConfigError, Settings
from epd.model_files.checkpoint import read_config
from epd.model_files.geometry import image_geometry
from epd.tiny import CHECKPOINT
from epd_lab.bench.costs import shape
from epd_lab.bench.traces.form import Trace
from epd_lab.bench.workload import Workload
from epd_lab.plan.costs import Costs, form_of, sizes_of
from epd_lab.plan.run import TEMPLATE_TOKENS

Request = tuple[int, int, list[int]]  # tokens of prompt and answer, patches of each image


def check_model(costs: Costs, model: str, settings: Settings) -> None:
    """`model`: a directory, a name of the hub, or of `shape`.  Raises ConfigError, ModelError."""
    config = _config_of(model)
    known, asked = costs.model, form_of(settings.engine, config)
    if sizes_of(config) != known.sizes or asked != known.form:
        flags = f"{'--shape' if model in shape.SIZES else '--model'} {model} --device cuda"
        for name in ("quantization", "kv_cache_dtype"):
            if (value := getattr(settings.engine, name)) not in {"", "auto"}:
                flags += f" --{name.replace('_', '-')} {value}"
        raise ConfigError(
            f"the costs are those of {known.name} ({known.form}) on {costs.device}, and {model} "
            f"({asked}) is another model or form; measure it: `epd bench calibrate {flags}`, "
            "and give the file: --costs FILE"
        )


def _config_of(model: str) -> dict[str, Any]:
    if model not in shape.SIZES:
        return read_config(find_model(model, weights=False))
    with scratch("epd-plan-") as place:
        return read_config(shape.write(Path(place), CHECKPOINT, model))


def requests_of(costs: Costs, workload: Workload, trace: Trace = ()) -> Iterator[Request]:
    """All of a workload, or of a trace.  Raises ConfigError for one that was not calibrated."""
    for stream in workload.streams:
        one = stream.shape
        yield from [
            _request(costs, one.text_tokens, one.output_tokens, [one.size] * one.images)
        ] * (stream.count)
    for asked in trace:
        sizes = [(picture.width, picture.height) for picture in asked.pictures]
        yield _request(costs, asked.tokens_in, asked.tokens_out, sizes)


def _request(costs: Costs, text: int, answer: int, sizes: Sequence[tuple[int, int]]) -> Request:
    names = ("patch_size", "merge_size", "min_pixels", "max_pixels")
    images = {name: getattr(costs.model, name) for name in names}
    found = [image_geometry({"model_type": "qwen3_vl"}, images, *size) for size in sizes]
    patches, (most, _) = [one.num_patches for one in found], costs.tower.patches_ms[-1]
    if max(patches, default=0) > most:
        raise ConfigError(
            f"an image has {max(patches)} patches, and images were calibrated up to {most}; "
            "smaller ones can be planned"
        )
    prompt = TEMPLATE_TOKENS + text + sum(one.num_rows for one in found)
    if prompt + answer > costs.step.longest:
        raise ConfigError(
            f"a request has {prompt + answer} tokens with its answer, and steps were calibrated up "
            f"to {costs.step.longest}; shorter ones can be planned"
        )
    return prompt, answer, patches
