"""A trace holds every state of every request, in its place and for its time."""

from __future__ import annotations

import json

from epd_lab.bench.servers.openai_load import Sample
from epd_lab.bench.servers.timelines import chrome_trace


def test_images_have_tracks_of_their_own_and_chunks_their_length() -> None:
    """Two images of one encoder, interleaved; a chunk says itself how long it lasted."""
    events = [("ENCODING@e0", "aa", 1.0), ("ENCODING@e0", "bb", 2.0), ("ENCODING@e0", "aa", 5.0),
              ("ENCODING@e0", "bb", 9.0)]  # fmt: skip
    timeline = [{"machine": m, "key": k, "state": "S", "t_ms": t} for m, k, t in events]
    timeline.append({"machine": "CHUNK@p0", "key": "1", "state": "C", "t_ms": 3.0, "ms": 0.5})
    trace = chrome_trace([("x", Sample(0.0, 0.1, timeline=timeline))])["traceEvents"]
    lasted = [(e["tid"], round(e["dur"])) for e in trace if e["ph"] == "X" and e["tid"]]
    assert lasted == [(1, 500), (2, 4000), (2, 0), (3, 7000), (3, 0)]
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    assert names == ["client", "CHUNK@p0 1", "ENCODING@e0 aa", "ENCODING@e0 bb"]


def test_states_become_slices() -> None:
    events = [("REQUEST@p0", "WAITING", 5.0), ("GENERATION", "PLACED", 1.0),
              ("REQUEST@p0", "RUNNING", 7.5), ("GENERATION", "FINISHED", 40.0)]  # fmt: skip
    timeline = [{"machine": m, "state": s, "t_ms": t} for m, s, t in events]
    sample = Sample(2.0, 2.05, 0.02, timeline=timeline)
    trace = json.loads(json.dumps(chrome_trace([("small", sample), ("small", Sample(3.0, 4.0))])))
    slices = {
        (e["pid"], e["tid"], e["name"]): (round(e["ts"]), round(e["dur"]))
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    }
    assert slices == {
        (1, 0, "request"): (2_000_000, 50_000),
        (1, 1, "PLACED"): (2_001_000, 39_000),
        (1, 1, "FINISHED"): (2_040_000, 0),
        (1, 2, "WAITING"): (2_005_000, 2_500),
        (1, 2, "RUNNING"): (2_007_500, 0),
        (2, 0, "request"): (3_000_000, 1_000_000),
    }
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["small 1", "client", "GENERATION", "REQUEST@p0", "small 2", "client"]
    (first,) = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert round(first["ts"]) == 2_020_000
