"""Requests whose stages a proxy drives one by one, as those of other servers do.

`kv_transfer_params` and `ec_transfer_params` come back with the answer of a stage and go into the
request of the next one.  They are never trusted for content: rows and KV are found by a hash of
their input, tenant included.  So another tenant's params, or wrong ones, find nothing and cost
computing it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd.api.http.errors import bad_request
from epd.api.http.faults import expected
from epd.api.http.shapes import JsonValue, Shape
from epd.frontend import PreparedItem, Stage

KV, EC = "kv_transfer_params", "ec_transfer_params"


class KvParams(Shape):
    """What is read; and, without effect, what proxies of other engines write there, and what our
    answers have besides."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: JsonValue = None
    decode_engine_id: JsonValue = None
    lease_s: JsonValue = None
    num_prompt_tokens: JsonValue = None
    remote_block_ids: JsonValue = None
    remote_engine_id: JsonValue = None
    remote_host: JsonValue = None
    remote_port: JsonValue = None
    tp_size: JsonValue = None
    transfer_id: JsonValue = None
    transport: JsonValue = None


class EcParams(Shape, kw_only=True):
    """Of one image."""

    remote_engine_id: str
    num_rows: JsonValue = None
    transport: JsonValue = None


@dataclass(frozen=True, slots=True)
class Staged:
    """The part of a request that is asked for, and the results of earlier parts."""

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


def read_staged(kv: KvParams | None, ec: Mapping[str, EcParams] | None) -> Staged:
    """Both parameters.  Raises ApiError 400."""
    if kv is None and ec is None:
        return WHOLE
    kv = kv or KvParams()
    if kv.do_remote_decode and kv.do_remote_prefill:
        message = f"{KV}: do_remote_decode and do_remote_prefill are of different requests"
        raise bad_request(message, KV)
    claim = kv.remote_request_id if kv.do_remote_prefill else ""
    if not isinstance(claim, str):
        raise expected(f"{KV}.remote_request_id", "a string", claim)
    encoded_at = {mm_hash: params.remote_engine_id for mm_hash, params in (ec or {}).items()}
    return Staged("prefill" if kv.do_remote_decode else "", encoded_at, claim)
