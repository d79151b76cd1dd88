"""What a plan is asked about that a cost file does not hold for is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd.cli.configure.hub import find_model
from epd.cli.scratch import scratch
from epd.config import ConfigError, Settings
from epd.model_files.checkpoint import read_config
from epd.model_files.geometry import image_geometry
from epd.tiny import CHECKPOINT
from epd_lab.bench.costs import shape
from epd_lab.bench.workload import Workload
from epd_lab.plan.costs import Costs, form_of, sizes_of
from epd_lab.plan.run import TEMPLATE_TOKENS

Request = tuple[int, int, list[int]]  # tokens of prompt and answer, patches of each image


def check_model(costs: Costs, model: str, settings: Settings) -> None:
    """`model`: a directory, a name of the hub, or of `shape`.  Raises ConfigError, ModelError."""
    config = _config_of(model)
    known, asked = costs.model, form_of(settings.engine, config)
    if sizes_of(config) != known.sizes or asked != known.form:
        raise ConfigError(
            f"the costs are those of {known.name} ({known.form}) on {costs.device}, and {model} "
            f"({asked}) is another model or form; measure it: `epd bench calibrate --model {model} "
            "--device cuda`, and give the file: --costs FILE"
        )


def _config_of(model: str) -> dict[str, Any]:
    if model not in shape.SIZES:
        return read_config(find_model(model, weights=False))
    with scratch("epd-plan-") as place:
        return read_config(shape.write(Path(place), CHECKPOINT, model))


def requests_of(costs: Costs, workload: Workload) -> Iterator[Request]:
    """All of a workload.  Raises ConfigError for one that was not calibrated."""
    images = images_settings(costs)
    for stream in workload.streams:
        one = stream.shape
        geometry = image_geometry({"model_type": "qwen3_vl"}, images, *one.size)
        check_image(costs, geometry.num_patches * bool(one.images), one.size)
        prompt = TEMPLATE_TOKENS + one.text_tokens + one.images * geometry.num_rows
        check_context(costs, prompt + one.output_tokens)
        for _ in range(stream.count):
            yield prompt, one.output_tokens, [geometry.num_patches] * one.images


def images_settings(costs: Costs) -> dict[str, Any]:
    """Of a preprocessor."""
    names = ("patch_size", "merge_size", "min_pixels", "max_pixels")
    return {name: getattr(costs.model, name) for name in names}


def check_image(costs: Costs, num_patches: int, size: tuple[int, int]) -> None:
    """Raises ConfigError."""
    most, _ = costs.tower.patches_ms[-1]
    if num_patches > most:
        raise ConfigError(
            f"an image of {size[0]} x {size[1]} has {num_patches} patches, and images were "
            f"calibrated up to {most}; smaller ones can be planned"
        )


def check_context(costs: Costs, tokens: int) -> None:
    """Raises ConfigError."""
    if tokens > costs.step.longest:
        raise ConfigError(
            f"a request has {tokens} tokens with its answer, and steps were calibrated up to "
            f"{costs.step.longest}; shorter ones can be planned"
        )
