"""The world of each machine, as data: for searches, walks, Promela (SPIN) and TLA+."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from epd.fsm.kernel import Table
from epd.fsm.tables import TABLES
from epd_lab.formal.adapter import adapter_model
from epd_lab.formal.child import child_model
from epd_lab.formal.embedding import embedding_model
from epd_lab.formal.encoding import ENCODINGS, encoding_model
from epd_lab.formal.fan_out import fan_out_model
from epd_lab.formal.form import Model
from epd_lab.formal.generation import generation_model
from epd_lab.formal.group import group_model
from epd_lab.formal.instance import instance_model
from epd_lab.formal.link import link_model
from epd_lab.formal.membership import membership_model
from epd_lab.formal.offer import offer_model
from epd_lab.formal.pair import PAIRS, pair_model
from epd_lab.formal.promela import promela
from epd_lab.formal.request import REQUESTS, request_model
from epd_lab.formal.tla import tla, tla_config


def models(tables: Mapping[str, Table] | None = None) -> tuple[Model, ...]:
    """Every model, of the tables that run, or of others by their names."""
    of = {table.name: table for table in TABLES} | dict(tables or {})
    return (
        generation_model(of["GENERATION"]),
        *(request_model(name, of["REQUEST"]) for name in REQUESTS),
        *(encoding_model(name, of["ENCODING"]) for name in ENCODINGS),
        embedding_model(of["EMBEDDING"]), instance_model(of["INSTANCE"]),
        membership_model(of["MEMBERSHIP"]), link_model(of["LINK"]),
        offer_model(for_rows=False, table=of["OFFER"]),
        offer_model(for_rows=True, table=of["OFFER"], name="OFFER_FOR_ROWS"),
        child_model(of["CHILD"]), group_model(of["GROUP"]), fan_out_model(of["FAN_OUT"]),
        adapter_model(of["ADAPTER"]),
        *(pair_model(name, of["OUTGOING"], of["INCOMING"]) for name in PAIRS),
    )  # fmt: skip


def write_promela(out: Path) -> list[Path]:
    """Write a file per model under `out`, which is made if absent; returns their paths."""
    return _write(out, {f"{model.name}.pml": promela(model) for model in models()})


def write_tla(out: Path) -> list[Path]:
    """Write a module and its configuration per model under `out`; returns their paths."""
    modules = {f"{model.name}.tla": tla(model) for model in models()}
    return _write(out, modules | {f"{m.name}.cfg": tla_config(m) for m in models()})


def _write(out: Path, files: Mapping[str, str]) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
    return [out / name for name in files]
