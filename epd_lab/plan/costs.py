"""The cost file: what the steps of one model on one kind of device take, as measured.

Theory of operation
-------------------
A step's time is put together from parts, each of which can be timed alone:

- products and all else that goes by the number of tokens of the step, from a table, because it
  rises in tiles;
- attention of decodes, by the tokens that they look back at: it reads their KV;
- attention of prompts, by pairs of a token and one that it looks back at: it is arithmetic;
- `mixed_ms`, what decodes beside a prompt cost besides.

So is a run of the tower: a table by patches, and pairs of patches of one image.  What is bound by
arithmetic takes `sustained` times as long in service as alone, where the card's power is its limit.
The host's part is the launch, the decoding of images, and what the event loop does for each
sequence of a step.  Threads that decode images hold the interpreter now and then, so what is
launched one by one meanwhile takes longer.

`epd bench calibrate` writes such a file; a bundled one names the sources of its figures.  It holds
for its card and model, for sequences up to `step.longest`, and for images up to the last point of
`tower.patches_ms`; nothing beyond is planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from epd.config import ConfigError, EngineConfig

BUNDLED = Path(__file__).parent / "h200_qwen3_vl_4b.json"

NEAR = 0.15  # of a measured goodput
_TEXT = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "num_experts moe_intermediate_size"
).split()
_VISION = "depth hidden_size intermediate_size patch_size".split()

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Points = Annotated[tuple[tuple[Count, Positive], ...], msgspec.Meta(min_length=1)]


class ModelCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes that decide what moves and what fits."""

    name: str
    sizes: tuple[int, ...]  # `sizes_of` its config.json
    form: str  # `form_of` its engines' settings
    kv_token_nbytes: Count  # of one token in all layers
    kv_tokens: Count  # that fit the KV pool of one device
    row_nbytes: Count  # of an image's row, with its deepstack levels
    tower_layers: Count
    patch_size: Count
    merge_size: Count
    min_pixels: Count  # between these two an image is resized
    max_pixels: Count


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host's time for a step or a run of the tower: captured up to a size, then one by one."""

    captured_ms: NotNegative
    max_captured: Annotated[int, msgspec.Meta(ge=0)]  # tokens or patches
    one_by_one_ms: NotNegative

    def host_s(self, *, captured: bool) -> float:
        return (self.captured_ms if captured else self.one_by_one_ms) / 1e3


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step of the language model on the device."""

    tokens_ms: Points  # by tokens of the step, without attention
    context_ns: NotNegative  # a decode, per token that it looks back at
    pair_ns: NotNegative  # a prompt, per pair of a token and one that it looks back at
    mixed_ms: NotNegative
    launch: Launch
    longest: Count  # tokens of a sequence, as far as was measured
    max_mixed: Count = 2048  # tokens of a captured step that has prompts and decodes


class TimedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that no cost was made of, as it was measured."""

    decodes: int
    context: int  # behind each
    prompt: int
    history: int  # behind that
    measured_ms: Positive


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plans beside a measurement: by how much of the measured goodput they are off."""

    report: str  # its name
    date: str
    errors: tuple[tuple[str, str, float], ...]  # workload, topology, error
    ordered: tuple[int, int]  # of so many workloads at two topologies the better one was planned so

    def __str__(self) -> str:
        off = sorted(abs(error) for _, _, error in self.errors)
        (right, all_), near = self.ordered, sum(error < NEAR for error in off)
        return (
            f"{self.report}, {self.date}: goodput of {near} of {len(off)} pairs of workload and "
            f"topology within {NEAR:.0%}, off by {off[len(off) // 2]:.0%} (median) and "
            f"{off[-1]:.0%} (at most); the better of two topologies named for {right} of {all_} "
            "workloads"
        )


class Tower(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of the vision tower on the device."""

    patches_ms: Points  # by patches of the run, without attention
    pair_ns: NotNegative  # per pair of patches of one image
    launch: Launch


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processors do."""

    request_ms: NotNegative  # of the gateway, one request at a time
    gateway_pixel_ns: NotNegative  # of an image, of the gateway as well
    way_pixel_ns: NotNegative  # of an image, on its way through clients and sockets
    pixel_ns: NotNegative  # decoding an image
    image_threads: Count
    interpreter: NotNegative  # how much longer launching one by one takes for each thread at work
    sequence_us: NotNegative  # the event loop, per sequence of a step


class HopTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows or KV from one instance to another."""

    latency_ms: NotNegative
    gb_per_s: Positive


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    sources: tuple[str, ...]  # where the figures are from
    device: str
    model: ModelCosts
    step: StepTimes
    tower: Tower
    host: Host
    hops: dict[str, HopTimes]  # by transport; the first is taken where none is named
    gap_ms: NotNegative = 0.0  # that the device stands still behind a slice, or a step with prompts
    sustained: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    checks: tuple[TimedStep, ...] = ()
    compared: Comparison | None = None

    def error(self, check: TimedStep) -> float:
        """By how much of the measured time the costs are off, alone on the card."""
        alone = msgspec.structs.replace(self, sustained=1.0)
        tokens, pairs = (
            check.decodes + check.prompt,
            check.prompt * (check.history + check.prompt / 2),
        )
        mixed = bool(check.decodes and check.prompt)
        took_s = alone.step_s(tokens, check.decodes * check.context, pairs, mixed=mixed)
        return 1e3 * took_s / check.measured_ms - 1

    def step_s(self, num_tokens: int, num_context: int, num_pairs: float, *, mixed: bool) -> float:
        """A step of so many tokens: decodes look back at `num_context`, prompts at `num_pairs`."""
        step = self.step
        alone_ms = step.tokens_ms[0][1]
        more_ms = between(step.tokens_ms, num_tokens) - alone_ms + step.pair_ns * num_pairs / 1e6
        total_ms = alone_ms + self.sustained * max(0.0, more_ms)
        return (total_ms + step.context_ns * num_context / 1e6 + step.mixed_ms * mixed) / 1e3

    def tower_s(self, images: Sequence[int]) -> float:
        """A run over images of so many patches each."""
        pairs = sum(patches * patches for patches in images)
        alone_ms = between(self.tower.patches_ms, sum(images)) + self.tower.pair_ns * pairs / 1e6
        return self.sustained * alone_ms / 1e3

    def hop(self, transport: str = "") -> HopTimes:
        """Raises ConfigError."""
        name = transport or next(iter(self.hops))
        if name not in self.hops:
            raise ConfigError(
                f"the cost file knows no transport {name!r}; choose {', '.join(self.hops)}"
            )
        return self.hops[name]


def sizes_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """By which models differ that take other times: 0 for what a config.json lacks."""
    text, vision = (config.get(f"{part}_config") or config for part in ("text", "vision"))
    return (*(int(text.get(n) or 0) for n in _TEXT), *(int(vision.get(n) or 0) for n in _VISION))


def form_of(engine: EngineConfig, config: Mapping[str, Any]) -> str:
    """Types of weights and KV."""
    stored = (config.get("quantization_config") or {}).get("quant_method")
    return f"{engine.quantization or stored or engine.dtype}, KV {engine.kv_cache_dtype}"


def of_card(card: str) -> Path:
    """The bundled file of a card; "h200" is enough of its name.  Raises ConfigError."""
    found = {read(path).device: path for path in sorted(BUNDLED.parent.glob("*.json"))}
    for device, path in found.items():
        if card and card.lower() in device.lower():
            return path
    raise ConfigError(
        f"--card {card}: there are costs of {', '.join(found)}; measure that card with "
        "`epd bench calibrate --device cuda` and give the file: --costs FILE"
    )


def between(points: Points, size: int) -> float:
    """By a line between two points; below the first as the first, beyond the last in proportion."""
    low_size, low = points[0]
    if size <= low_size:
        return low
    for high_size, high in points[1:]:
        if size <= high_size:
            return low + (high - low) * (size - low_size) / (high_size - low_size)
        low_size, low = high_size, high
    return low * size / low_size


def read(path: Path) -> Costs:
    """Raises ConfigError."""
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=Costs)
    except OSError as error:
        raise ConfigError(
            f"--costs {path}: {error.strerror}; `epd bench calibrate --out FILE` writes such a file"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--costs {path} is no cost file: {error}; `epd bench calibrate` writes one, "
            f"and {BUNDLED} is an example"
        ) from error
    for name, points in (
        ("step.tokens_ms", costs.step.tokens_ms),
        ("tower.patches_ms", costs.tower.patches_ms),
    ):
        if list(points) != sorted(dict(points).items()):
            raise ConfigError(f"--costs {path}: the sizes of {name} must rise; sort them")
    if not costs.hops:
        raise ConfigError(f"--costs {path}: hops is empty; name a transport with its rate")
    return costs


def write(costs: Costs, path: Path) -> None:
    """A line for each part."""
    parts = [f'"{name}": {json.dumps(part)}' for name, part in msgspec.to_builtins(costs).items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
