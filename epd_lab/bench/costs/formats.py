"""What formats of weights take: memory, and device times of decodes, of models of true size.

A model of each format is probed by two numbers of its layers, with random weights and 2,048 tokens
behind each sequence (`probe`).  A line through both is the whole.  Tokens per second are sequences
by that time: a host that keeps up adds nothing, and sampling is in it.

Where the shape has a layer for drafts, a step that verifies drafts and makes the next ones is timed
beside a plain one without that layer.  Random weights agree in nothing, so what is found is the
cost alone: so many of the drafts must hold on the mean for as many tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from epd_lab.bench.costs.probe import Probe, Timings
from epd_lab.bench.costs.probe_table import Line
from epd_lab.diagrams.page import markdown_table

NUM_DRAFTS = 3
TIMED = Timings(decodes=(1, 8, 64), prompts=(2048,), sees=False)
PLAIN = "bfloat16"
_COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*visual.*"]}


def _groups(name: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {**_COMPRESSED, "format": name, "config_groups": groups}


FORMATS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "--quantization fp8": {"quantization": "fp8"},
    "fp8, blocks of 128 x 128": {
        "stored": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    },
    "fp8, channels": {
        "stored": _groups("float-quantized", num_bits=8, type="float", strategy="channel")
    },
    "int4, groups of 128": {
        "stored": _groups(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128
        )
    },
    "AWQ, groups of 128": {
        "stored": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    },
    "NVFP4": {"stored": _groups("nvfp4-pack-quantized", num_bits=4, type="float")},
    "MXFP4": {"stored": _groups("mxfp4-pack-quantized", num_bits=4, type="float")},
}
MODELS = {  # of `shape`, and the numbers of layers; hybrids repeat every four
    "Qwen3-VL-8B": ("8b", (4, 12)),
    "Qwen3-VL-32B": ("32b", (4, 12)),
    "Qwen3-VL-30B-A3B": ("30b-a3b", (4, 12)),
    "Qwen3.6-27B": ("qwen3.6-27b", (4, 12)),
    "Qwen3.6-35B-A3B": ("qwen3.6-35b-a3b", (8, 16)),
}
DRAFTING = {"qwen3.6-27b", "qwen3.6-35b-a3b"}  # shapes with a layer for drafts
HEADER = [
    *("model", "format", "language, GiB", "1 user, tokens/s", "8 users", "64 users"),
    *("of bfloat16's time: 1 / 8 / 64", "prompt of 2k, ms"),
    *(f"step with {NUM_DRAFTS} drafts by a plain one", f"must hold of {NUM_DRAFTS}"),
]


def probes(models: Sequence[str], formats: Sequence[str]) -> list[Probe]:
    """Of each of these models in each of these formats; a row's model has both names."""
    return [
        Probe(
            f"{model}, {name}",
            MODELS[model][1],
            MODELS[model][0],
            num_drafts=NUM_DRAFTS * (MODELS[model][0] in DRAFTING),
            **FORMATS[name],
        )
        for model in models
        for name in formats
    ]


def rows(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Whole models, of which both measurements are there; for the others, why not."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        found.setdefault(row["model"], []).append(row)
    for name, pair in found.items():
        model, _, kind = name.partition(", ")
        failed = next((row["failed"] for row in pair if "failed" in row), "")
        if failed or len(pair) < 2:
            yield {"model": model, "format": kind, "failed": failed or "half of it is measured"}
            continue
        line = Line(pair[0], pair[-1])
        names = [f"decode_{n}_ms" for n in TIMED.decodes]
        names += [f"prefill_{n}_ms" for n in TIMED.prompts]
        names += [name for name in pair[0]["figures"] if name.startswith("drafted_")]
        whole = {name: line.whole(name) for name in ("weights_nbytes", *names)}
        yield {"model": model, "format": kind, **whole}


def table(report: Mapping[str, Any]) -> str:
    each = list(rows(report))
    plain = {row["model"]: row for row in each if row["format"] == PLAIN and "failed" not in row}
    return markdown_table(HEADER, [_cells(row, plain.get(row["model"])) for row in each])


def _cells(row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[str]:
    if "failed" in row:
        return [row["model"], row["format"], row["failed"], *[""] * (len(HEADER) - 3)]
    names = [f"decode_{n}_ms" for n in TIMED.decodes]
    speeds = [f"{1e3 * n / row[name]:.0f}" for n, name in zip(TIMED.decodes, names, strict=True)]
    shares = [f"{row[name] / plain[name]:.2f}" for name in names] if plain is not None else []
    prompt = f"{row[f'prefill_{TIMED.prompts[0]}_ms']:.0f}"
    gib = f"{row['weights_nbytes'] / 2**30:.1f}"
    drafted = [row.get(f"drafted_{n}_ms", 0.0) for n in TIMED.decodes]
    costs = [ms / row[name] for ms, name in zip(drafted, names, strict=True) if ms]
    drafts = [" / ".join(f"{cost - less:.2f}" for cost in costs) for less in (0, 1)]
    return [row["model"], row["format"], gib, *speeds, " / ".join(shares), prompt, *drafts]
