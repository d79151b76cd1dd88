"""Requests whose stages somebody else drives, one by one, as proxies of other servers do.

`kv_transfer_params` and `ec_transfer_params` come back with the answer of a stage and go into the
request of the next one.  What they say is never trusted for content: rows and KV are found by what
they are made of, tenant included, so that params of another tenant, or wrong ones, find nothing and
cost computing it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd.api.http import fields
from epd.api.http.errors import bad_request
from epd.frontend import PreparedItem, Stage

KV, EC = "kv_transfer_params", "ec_transfer_params"
KV_READ = ("do_remote_decode", "do_remote_prefill", "remote_request_id")
# What other engines' proxies write there, and what our answers tell besides: without effect.
KV_INERT = (
    "decode_engine_id", "lease_s", "num_prompt_tokens", "remote_block_ids", "remote_engine_id",
    "remote_host", "remote_port", "tp_size", "transfer_id", "transport",
)  # fmt: skip
EC_KEYS = ("num_rows", "remote_engine_id", "transport")


@dataclass(frozen=True, slots=True)
class Staged:
    """Which part of a request is wanted, and what earlier parts said."""

    stage: Stage = ""
    encoded_at: Mapping[str, str] = field(default_factory=dict)  # by mm_hash: an encoder
    claim: str = ""  # the request whose KV a prefill instance holds for this one

    def check(self, items: tuple[PreparedItem, ...]) -> None:
        """Against the prompt that was prepared.  Raises ApiError 400."""
        if self.stage == "encode" and not items:
            raise bad_request("there is no image or video to encode", "messages")
        known = {item.mm_hash for item in items}
        strange = next((mm_hash for mm_hash in self.encoded_at if mm_hash not in known), None)
        if strange is not None:
            shown = strange[:16]
            message = f"{EC} names {shown}…, which is no image of this request and this tenant"
            raise bad_request(message, EC)


WHOLE = Staged()


def read_staged(present: Mapping[str, object]) -> Staged:
    """Both parameters.  Raises ApiError 400."""
    if KV not in present and EC not in present:
        return WHOLE
    kv = fields.mapping(present.get(KV, {}), KV)
    fields.only(kv, KV, (*KV_READ, *KV_INERT))
    holds, claims = (
        kv.get(key) is not None and fields.boolean(kv[key], f"{KV}.{key}") for key in KV_READ[:2]
    )
    if holds and claims:
        message = f"{KV}: do_remote_decode and do_remote_prefill are of different requests"
        raise bad_request(message, KV)
    claim = fields.string(kv.get("remote_request_id"), f"{KV}.remote_request_id") if claims else ""
    return Staged("prefill" if holds else "", _encoded_at(present), claim)


def _encoded_at(present: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for mm_hash, said in fields.mapping(present.get(EC, {}), EC).items():
        path = f"{EC}.{mm_hash[:64]}"
        told = fields.mapping(said, path)
        fields.only(told, path, EC_KEYS)
        found[mm_hash] = fields.string(told.get("remote_engine_id"), f"{path}.remote_engine_id")
    return found
