"""The rows in order, each with what is right and the public report that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from epd.tiny import SAMPLES
from epd_lab.bench.truth import faults, rows

REFUSED, ALL = "a refusal (4xx), then right", "all right"


@dataclass(frozen=True, slots=True)
class NamedRow:
    name: str
    right: str  # in words: what a cell should have
    report: str  # repository and number
    ask: rows.Row
    setup: str = "e+pd"  # or `2p+d`, `p+2d`, where a front has as many


# Those that may end a server come last; a server of another setup needs its start only once.
ROWS = (
    NamedRow("19 questions with pictures", ALL, "TokenSpeed 437", rows.goldens),
    NamedRow("one picture twice in a request", ALL, "vllm 58123", rows.duplicates),
    NamedRow("60 pictures at once", ALL, "vllm 43473", rows.at_once(60)),
    NamedRow("200 pictures at once", ALL, "sglang 23082", rows.at_once(200)),
    NamedRow("bytes that are no picture", REFUSED, "sglang 36945", rows.bad("data:image/png;base64,AAAA")),
    NamedRow("a picture that is cut off", REFUSED, "vllm 55546", rows.bad(rows.cut_picture())),
    NamedRow("a file:// URL", REFUSED, "vllm 43117", rows.bad((SAMPLES / rows.METER[0]).as_uri())),
    NamedRow("a URL on loopback", REFUSED, "vllm 57157", rows.bad("http://127.0.0.1:9/x.png")),
    NamedRow("another picture's uuid", "right or refused, then right", "vllm 55547", rows.uuid_of_another),
    NamedRow("20 clients leave", "right, memory back", "vllm 46283", rows.clients_leave),
    NamedRow("kill -9 of one of two encoders", "all right, then right", "TokenSpeed 437", faults.killed_under_load("encode")),
    NamedRow("kill -9 of every encoder", "right or 503", "sglang 22253", faults.killed_under_load("encode", None)),
    NamedRow("a grid without rows", REFUSED, "vllm 56432", rows.grid_without_rows),
    NamedRow("kill -9 of PD amid streams", ALL, "vllm-ascend 13165", faults.killed_amid_streams("pd")),
    NamedRow("20 clients leave P + D", "right, memory back", "vllm 41269", rows.clients_leave, "2p+d"),
    NamedRow("kill -9 of P amid streams", ALL, "vllm-ascend 13165", faults.killed_amid_streams("prefill"), "2p+d"),
    NamedRow("kill -9 of D amid streams", ALL, "vllm-ascend 13165", faults.killed_amid_streams("decode"), "p+2d"),
)  # fmt: skip
