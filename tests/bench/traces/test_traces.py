"""Traces: what is read is what was written, drawn by the law that is named, sent when it is due."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.cli.main import main
from epd_lab.bench.gateway.gateway import running
from epd_lab.bench.servers.openai_load import Sample
from epd_lab.bench.traces import form, published, shapes
from epd_lab.bench.traces.form import Picture, TraceRequest
from epd_lab.bench.traces.replay import _settled, body_of, lateness_ms, replay
from epd_lab.bench.workload import Wording
from epd_lab.plan import traced

COUNTS = st.integers(1, 10_000)
PICTURES = st.builds(Picture, COUNTS, COUNTS, st.integers(0, 1 << 62))
ASKED = st.builds(
    TraceRequest,
    st.floats(0, 3600, allow_nan=False),
    COUNTS,
    COUNTS,
    st.lists(PICTURES, max_size=2).map(tuple),
    st.lists(COUNTS, max_size=2).map(tuple),
    st.text("abc", max_size=2),
    st.sampled_from(["chat", "burst"]),
)


@given(st.lists(ASKED, max_size=5))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, trace: list[TraceRequest]
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    form.write(trace, path)
    assert published.read(path) == form.ordered(trace)


def test_mooncakes_lines_have_blocks(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [(3000, 1100, 5, [7, 8, 9]), (1000, 1024, 3, [7, 8])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, one, strict=True))) for one in lines))
    first, second = published.read(path)
    assert first == TraceRequest(0.0, 1024, 3, blocks=(7,)), "a text's last token is its own"
    assert second == TraceRequest(2.0, 1100, 5, blocks=(7, 8))
    assert second.own_tokens == 1100 - 1024


def test_burstgpts_failed_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,10,0,10,API log\n"
        "45.5,ChatGPT,1087,230,1317,API log\n"
    )
    kinds = [(a.arrival_s, a.tokens_in, a.tokens_out, a.kind) for a in published.read(path)]
    assert kinds == [(0.0, 472, 18, "Conversation log"), (40.5, 1087, 230, "API log")]


def test_servegens_clients_send_by_their_tables(tmp_path: Path) -> None:
    data = {"text_tokens": "{9: 1.0}", "image_tokens": "{1196: 1.0}", "image_count": "{2: 1.0}",
            "output_tokens": "{3: 0.5, 5: 0.5}"}  # fmt: skip
    (tmp_path / "chunk-0-trace.csv").write_text(
        "0,2.0,0.5,Gamma,4.0,0.125\n600,0,0,,0,0\n1200,2.0,1.0,Weibull,1.0,0.5\n"
    )
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps({"0": data}))
    trace = published.read(tmp_path)
    first, later = ([a for a in trace if lo <= a.arrival_s < lo + 600] for lo in (0, 1199))
    assert len(trace) == len(first) + len(later), "nothing in the window without a law"
    assert abs(len(first) - 1200) < 4 * (0.5 * 1200**0.5)
    assert abs(len(later) - 1200) < 4 * 1200**0.5
    assert {a.tokens_out for a in trace} == {3, 5}
    (one, other) = trace[0].pictures
    assert one.number != other.number
    assert abs(one.width * one.height / 28**2 / 1196 - 1) < 0.02


def test_burstgpts_gaps_and_lengths_are_of_its_laws() -> None:
    trace = shapes.drawn("burstgpt", 5.0, 4000.0)
    gaps_s = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(trace)]
    mean_s = statistics.fmean(gaps_s)
    assert mean_s == pytest.approx(0.2, rel=0.05)
    assert statistics.pvariance(gaps_s) / mean_s**2 == pytest.approx(2.0, rel=0.1)
    lengths = [a.tokens_in for a in trace]
    assert max(lengths) < 1024
    assert lengths.count(1) / lengths.count(2) == pytest.approx(2**1.1, rel=0.1)


@pytest.mark.parametrize("percent", [0, 50])
def test_so_many_texts_begin_as_one_before(percent: int) -> None:
    trace, known, again = shapes.drawn(f"prefix-{percent}", 10.0, 100.0), set(), 0
    for asked in trace:
        again += asked.blocks in known
        known.add(asked.blocks)
    assert again / len(trace) == pytest.approx(percent / 100, abs=0.05)


def test_what_is_equal_in_a_trace_is_equal_in_its_bodies() -> None:
    def parts(asked: TraceRequest, index: int, seed: int = 0) -> list[str]:
        content = json.loads(body_of(asked, index, Wording(1.0), seed))["messages"][0]["content"]
        return [str(part.get("text") or part["image_url"]["url"]) for part in content]

    one = TraceRequest(0.0, 600, 4, (Picture(32, 32, 5),), (3,))
    other = TraceRequest(1.0, 600, 4, (Picture(32, 32, 5),), (3,))
    assert parts(one, 0)[:2] == parts(other, 1)[:2]
    assert parts(one, 0)[2] != parts(other, 1)[2]
    assert not set(parts(one, 0)) & set(parts(one, 0, seed=1)), "another seed finds no cache warm"
    (short,), (long,) = (parts(TraceRequest(0.0, n, 4, session="s"), n) for n in (50, 80))
    assert long.startswith(short)
    assert len(long.split()) == 80


async def test_requests_are_sent_when_they_are_due_whatever_the_server_does() -> None:
    trace = [TraceRequest(0.02 * number, 1, 1) for number in range(10)]

    class Slow:
        async def ask(self, body: int, zero_s: float) -> Sample:
            sample = Sample(asyncio.get_running_loop().time() - zero_s)
            await asyncio.sleep(0.3)
            return sample

    async def bodies() -> AsyncIterator[int]:
        for number in range(10):
            yield number

    clock = asyncio.get_running_loop().time
    samples = await replay(Slow(), trace, bodies(), lambda sample: None, clock)
    p50, _, most = lateness_ms(trace, samples)
    assert 0.0 <= p50 <= most < 1000.0, "one behind the other the last would be 2.5 s late"


class MetricsPage:
    """Of a server whose count of encodes grows with each look at it."""

    def __init__(self, *counts: int) -> None:
        self._counts = list(counts)

    async def text(self, path: str) -> str:
        assert path == "/metrics"
        count = self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]
        return (
            "# HELP epd_encodes_total images encoded\n"
            f'epd_encodes_total{{instance="e0"}} {count}.0\n'
            'epd_encodes_total{instance="e1"} 2.0\n'
        )


async def test_the_count_is_of_all_encoders_and_late_ones_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(delay_s: float) -> None:
        """No waiting."""

    monkeypatch.setattr(asyncio, "sleep", at_once)
    assert await _settled(MetricsPage(5, 9, 14, 14), 2, 14) == 14  # type: ignore[arg-type]
    assert await _settled(MetricsPage(14, 15), 2, 14) == 15  # type: ignore[arg-type]


async def test_a_server_gets_a_trace_and_encodes_each_picture_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client is not late."""
    trace, saved = tmp_path / "trace.jsonl", tmp_path / "seen.json"
    numbers = [number % 30 for number in range(100)]
    form.write(
        [TraceRequest(i / 40, 64, 24, (Picture(112, 112, n),)) for i, n in enumerate(numbers)],
        trace,
    )
    async with running(time_machines=False) as cluster:
        url = f"http://127.0.0.1:{cluster.port}"
        asked = ["bench", "trace", str(trace), "--url", url, "--save", str(saved)]
        assert await asyncio.to_thread(main, asked) == 0
    told = json.loads(saved.read_text())
    assert told["requests"] == told["rows"][0]["figures"]["requests"] == len(numbers)
    assert told["pictures"] == {"sent": 100, "distinct": 30, "encoded": 30}
    assert told["rows"][0]["figures"]["failed"] == 0
    assert told["late_ms"]["p50"] < 50.0
    assert "at most; pictures sent 100" in capsys.readouterr().out


def test_a_trace_in_parts_is_the_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "LEAD_S", 2.0)
    trace = tmp_path / "trace.jsonl"
    drawn = ["small", "--rate", "3", "--seconds", "16"]
    assert main(["bench", "trace", *drawn, "--write", str(trace)]) == 0
    found = []
    for parts in ("1", "2"):
        asked = ["bench", "trace", str(trace), "--sim", "1epd", "--parts", parts, "--json"]
        assert main([*asked, "--slo", "ttft=500", "--slo", "small:ttft=1"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, two = (report["rows"][0]["figures"] for report in found)
    assert one["requests"] == two["requests"] == len(form.read(trace))
    assert one["ttft_ms_p50"] == pytest.approx(two["ttft_ms_p50"], rel=0.05)
    assert one["good_share"] == 0.0, "the SLO of its kind goes first"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["tall", "--url", "http://x"], "choose burstgpt, prefix-N, text"),
        ([__file__, "--url", "http://x"], "line 1"),
        (["small", "--sim", "1epd", "--rate", "0"], "--rate 0: a number above 0"),
        (["small", "--sim", "1epd", "--only", "chat"], "there are small"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "trace", *flags]) == 2
    assert said in capsys.readouterr().err
