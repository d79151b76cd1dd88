"""What the messages of the modelled rooms carry: one slot, of one peer."""

from __future__ import annotations

from epd.layouts import KvLayout
from epd.messages import Grant, KvOffer
from epd.records import Address, RemoteRegion, SamplingParams

PEER = Address("peer", 1, "")
NBYTES = 64
REGION = RemoteRegion(
    backend="sim",
    instance_id="peer",
    epoch=1,
    region_id="rows",
    locator="",
    slot_nbytes=NBYTES,
    num_slots=1,
)
OFFER = KvOffer(
    room="room",
    request_id="r",
    attempt=1,
    num_prompt_tokens=4,
    num_emitted=0,
    token_ids=(1, 2, 3, 4),
    sampling=SamplingParams(max_tokens=1),
    layout=KvLayout(
        num_layers=1, block_size=1, num_kv_heads=1, head_dim=1, dtype="f32", block_nbytes=NBYTES
    ),
    gateway=PEER,
    deadline_s=0.0,
)


def grant(room: str, num_rows: int) -> Grant:
    return Grant(
        room=room,
        attempt=1,
        mm_hash="",
        region=REGION,
        slots=(0,),
        contract=None,
        num_rows=num_rows,
        deadline_s=0.0,
    )
