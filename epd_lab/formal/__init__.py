"""The world of each machine, as data: for searches, walks, Promela (SPIN) and TLA+."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from epd.fsm.kernel import Table
from epd.fsm.tables import TABLES
from epd_lab.formal import encoding, pair, request
from epd_lab.formal.child import child_model
from epd_lab.formal.embedding import embedding_model
from epd_lab.formal.encoding import encoding_model
from epd_lab.formal.fan_out import fan_out_model
from epd_lab.formal.form import Model
from epd_lab.formal.generation import generation_model
from epd_lab.formal.group import group_model
from epd_lab.formal.instance import instance_model
from epd_lab.formal.link import link_model
from epd_lab.formal.membership import membership_model
from epd_lab.formal.offer import offer_model
from epd_lab.formal.pair import pair_model
from epd_lab.formal.promela import promela
from epd_lab.formal.request import request_model
from epd_lab.formal.tla import tla, tla_config

REQUESTS = {
    "REQUEST_TEXT": request.Told(),
    "REQUEST_AHEAD": request.Told(ahead=True),
    "REQUEST_IMAGES": request.Told(images=True),
    "REQUEST_LATE_IMAGES": request.Told(images=True, begins_early=False, ahead=True),
    "REQUEST_HELD": request.Told(for_its_prompt=True),
    "REQUEST_KV_LEAVES": request.Told(decode_here=False),
    "REQUEST_IMAGES_KV_LEAVES": request.Told(decode_here=False, images=True),
    "REQUEST_KV_COMES": request.Told(remote_kv=True),
    "REQUEST_KV_COMES_AHEAD": request.Told(remote_kv=True, ahead=True),
}
ENCODINGS = {
    "ENCODING": encoding.Told(),
    "ENCODING_STORED": encoding.Told(stored=True),
    "ENCODING_WITHOUT_TOWER": encoding.Told(stored=True, encodes=False),
}
_CALM = {"may_die": False, "may_be_declared_lost": False}
PAIRS = {
    "PAIR": pair.Told(engine_is_certain=False),
    "PAIR_MESSAGES_LOST_IN_DOUBT": pair.Told(engine_is_certain=False, forgetful=True, **_CALM),
    "PAIR_KV": pair.Told(offers=True, may_die=False),
    "PAIR_KV_IN_PARTS": pair.Told(offers=True, may_die=False, in_parts=True),
    "PAIR_KV_IN_PARTS_IN_DOUBT": pair.Told(
        offers=True, in_parts=True, engine_is_certain=False, **_CALM
    ),
    "PAIR_CONTRACT_DRIFT": pair.Told(contract_holds=False),
    "PAIR_SHORT_COMMIT": pair.Told(commit_is_short=True, may_die=False),
    "PAIR_MESSAGES_LOST": pair.Told(forgetful=True, **_CALM),
    "PAIR_MESSAGES_LOST_KV": pair.Told(forgetful=True, offers=True, **_CALM),
    "PAIR_DECLARED_LOST": pair.Told(forgetful=True, may_die=False),
    "PAIR_HEALS": pair.Told(engine_is_certain=False, forgetful=True, faults_stop=True),
}


def models(tables: Mapping[str, Table] | None = None) -> tuple[Model, ...]:
    """Every model, of the tables that run, or of others by their names."""
    of = {table.name: table for table in TABLES} | dict(tables or {})
    return (
        generation_model(of["GENERATION"]),
        *(request_model(told, of["REQUEST"], name) for name, told in REQUESTS.items()),
        *(encoding_model(told, of["ENCODING"], name) for name, told in ENCODINGS.items()),
        embedding_model(of["EMBEDDING"]), instance_model(of["INSTANCE"]),
        membership_model(of["MEMBERSHIP"]), link_model(of["LINK"]),
        offer_model(for_rows=False, table=of["OFFER"]),
        offer_model(for_rows=True, table=of["OFFER"], name="OFFER_FOR_ROWS"),
        child_model(of["CHILD"]), group_model(of["GROUP"]), fan_out_model(of["FAN_OUT"]),
        *(pair_model(told, of["OUTGOING"], of["INCOMING"], name) for name, told in PAIRS.items()),
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
