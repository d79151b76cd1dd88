"""The unattended measurement: what is known is kept, and one broken server is not the end of it."""

from __future__ import annotations

import argparse
import base64
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from epd import tiny
from epd.api.prompts.prepare import Preparer
from epd.cli.parser import UsageError
from epd.config import GatewayConfig
from epd.model_files.checkpoint import read_config, read_preprocessor
from epd_lab.bench import gpu, plots
from epd_lab.bench.costs import roofline, shape
from epd_lab.bench.costs.roofline import CARDS, Roofline, card_of
from epd_lab.bench.servers.figures import Slo, figures, spread_of
from epd_lab.bench.servers.openai_load import Sample, ServerError
from epd_lab.bench.servers.serve import Rows, ServePlan, Target
from epd_lab.bench.verbs import gpu as verb_gpu
from epd_lab.bench.workload import (
    NAMED,
    Bursts,
    Closed,
    Poisson,
    Stream,
    Wording,
    Workload,
    bodies,
    crowded,
)

Told = Sequence[Rows | Exception]  # of each workload, and what ended it


def told(server: str, seconds: float, errors: Sequence[str] = ()) -> list[Rows]:
    samples = [Sample(0.0, seconds, 0.1, [0.02], 7, 4, errors[0] if errors else "")]
    return [
        [
            {
                "workload": name, "stream": name, "server": server,
                "figures": figures(samples, Slo()), "errors": list(errors),
                "spread": spread_of([figures(samples, Slo())]),
            }
        ]
        for name in ("3x560", "text")
    ]  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Told]], None]:
    def answers(by_name: dict[str, Told]) -> None:
        async def measure(plan: ServePlan, known: Callable[[Rows], None]) -> None:
            for rows in by_name[plan.targets[0].name]:
                if isinstance(rows, Exception):
                    raise rows
                known(rows)

        monkeypatch.setattr(gpu, "measure", measure)

    return answers


def plan(*names: str) -> ServePlan:
    workloads = (NAMED["text"], NAMED["3x560"])
    return ServePlan(tuple(Target(name, url="http://x") for name in names), workloads, 3, Slo())


async def test_a_broken_topology_is_a_line_of_the_report(
    measured: Callable[[dict[str, Told]], None], tmp_path: Path
) -> None:
    answers = {
        "2epd": told("2epd", 2.0),
        "1e1pd": [told("1e1pd", 4.0)[0], ServerError("gone")],
        "1ep1d": told("1ep1d", 1.0),
    }
    measured(answers)
    found = await gpu.measure_all(plan(*answers), tmp_path)
    assert found["broken"] == {"1e1pd": "ServerError: gone"}
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["rows"] == found["rows"]
    by_name = {(r["workload"], r["server"]): r["figures"]["req_per_s"] for r in kept["rows"]}
    assert by_name["text", "1ep1d / 2epd"] == pytest.approx(2.0)
    assert by_name["3x560", "1e1pd / 2epd"] == pytest.approx(0.5)  # what was known before
    assert [r["workload"] for r in kept["rows"][:5]] == ["text"] * 2 + ["3x560"] * 3
    assert "1e1pd was not measured to the end: ServerError: gone" in gpu.report(found)


async def test_the_last_one_that_breaks_is_in_the_report_that_is_kept(
    measured: Callable[[dict[str, Told]], None], tmp_path: Path
) -> None:
    measured({"2epd": told("2epd", 2.0), "1e1pd": [ServerError("gone")]})
    await gpu.measure_all(plan("2epd", "1e1pd"), tmp_path)
    assert (
        "1e1pd was not measured to the end: ServerError: gone" in (tmp_path / "gpu.md").read_text()
    )
    measured({"1e1pd": [ServerError("gone")]})
    await gpu.measure_all(plan("1e1pd"), tmp_path)  # nothing is known at all
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == []


async def test_the_status_tells_of_failures(
    measured: Callable[[dict[str, Told]], None], tmp_path: Path
) -> None:
    measured({"a": told("a", 1.0)})
    assert "broken" in await gpu.measure_all(plan("a"), tmp_path)
    measured({"a": told("a", 1.0, ["HTTP 500"])})
    assert "a text text: HTTP 500" in gpu.report(await gpu.measure_all(plan("a"), tmp_path))


@pytest.mark.parametrize(("errors", "status"), [([], 0), (["HTTP 500"], 1)])
def test_status(
    measured: Callable[[dict[str, Told]], None], tmp_path: Path, errors: list[str], status: int
) -> None:
    measured({"a": told("a", 1.0, errors)})
    assert gpu.run(plan("a"), tmp_path, as_json=True) == status


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Stream]]:
    """The streams that `epd bench gpu` would send, given these flags."""
    plans: list[ServePlan] = []
    monkeypatch.setattr(gpu, "run", lambda plan, *args, **flags: plans.append(plan) or 0)
    parser = argparse.ArgumentParser()
    verb_gpu.add_to(parser.add_subparsers())
    given = ["gpu", "--gpus", "2", "--device", "cpu", "--out", str(tmp_path), "--topology", "2epd"]

    def streams(*flags: str) -> list[Stream]:
        verb_gpu.run(parser.parse_args([*given, *flags]))
        return [stream for workload in plans.pop().workloads for stream in workload.streams]

    return streams


def test_a_short_run_sends_less_of_each_stream(planned: Callable[..., list[Stream]]) -> None:
    given = ["--workload", "mixed", "--workload", "text-c1", "--model", str(tiny.CHECKPOINT)]
    assert [stream.count for stream in planned(*given, "--requests", "30")] == [30, 24, 6]
    for flag in ("--requests", "--users", "--times"):
        with pytest.raises(UsageError, match="at least 1"):
            planned(*given, flag, "0")


def test_a_long_run_sends_more_of_each_stream(planned: Callable[..., list[Stream]]) -> None:
    given = ["--workload", "mixed", "--model", str(tiny.CHECKPOINT), "--times", "4"]
    assert [stream.count for stream in planned(*given)] == [512, 96]
    assert [stream.count for stream in planned(*given, "--requests", "30")] == [30, 30]
    with pytest.raises(UsageError, match="repeat its lines"):
        planned(*given, "--workload", __file__)


def test_more_users_ask_at_a_time(planned: Callable[..., list[Stream]], tmp_path: Path) -> None:
    """With four GPUs twice as many, so that a GPU has as many as one of two."""
    given = ["--workload", "mixed", "--model", str(tiny.CHECKPOINT)]
    one, two = planned(*given), planned(*given, "--users", "2")
    assert [(s.arrival, s.count) for s in one] == [(Closed(16), 128), (Bursts(8, 5.0), 24)]
    assert [(s.arrival, s.count) for s in two] == [(Closed(32), 256), (Bursts(16, 5.0), 48)]
    assert planned(*given, "--gpus", "4") == two
    assert planned(*given, "--gpus", "4", "--users", "1") == one
    sent = planned(*given, "--users", "3", "--times", "2", "--requests", "500")
    assert [(s.arrival, s.count) for s in sent] == [(Closed(48), 500), (Bursts(24, 5.0), 144)]
    (tmp_path / "lines").write_text("{}\n" * 5)
    (lines,) = planned("--workload", str(tmp_path / "lines"), "--users", "2", *given[2:])
    assert (lines.arrival, lines.count) == (Closed(32), 5), "a file has the requests that it has"
    open_loop = replace(NAMED["text"].streams[0], arrival=Poisson(3.0))
    assert crowded(open_loop, 2).arrival == Poisson(6.0)


def test_random_experts_are_chosen_by_tokens_that_are_drawn(
    planned: Callable[..., list[Stream]],
) -> None:
    """Greedy, all answers of such weights say the same token, and few experts are read."""
    for size, temperature in (("4b", 0.0), ("30b-a3b", 1.0)):
        told = planned("--shape", size, "--workload", "mixed", "--workload", "text")
        assert [stream.shape.temperature for stream in told] == [temperature] * 3
        stream = replace(told[0], count=1)
        body, *_ = bodies(Workload("w", (stream,)), stream, Wording(1.0), 0, lambda n: None)
        assert json.loads(body)["temperature"] == temperature


def test_the_image_has_a_bar_per_server_and_figure() -> None:
    rows = [row for known in told("one", 1.0) + told("two", 2.0) for row in known]
    cards = ["NVIDIA H200, driver 1"] * 4
    found = {"rows": rows, "repeats": 3, "machine": gpu.describe(), "gpus": cards}
    root = ET.fromstring(plots.bars(found))
    assert "".join(root.itertext()).count(cards[0]) == 1  # four of them, in a line that fits
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    bars = [line.get("points", "") for line in lines if line.get("stroke-width") == "13"]
    assert len(bars) == 2 * 2 * len(plots.FIGURES)
    ends = [[float(at.partition(",")[0]) for at in bar.split()] for bar in bars]
    widths = [right - left for left, right in ends]
    assert max(widths) == plots.LONGEST
    assert widths[:2] == [plots.LONGEST, plots.LONGEST / 2]  # requests per second


def test_the_shape_has_a_word_for_every_token(tmp_path: Path) -> None:
    directory = shape.write(tmp_path / "m", tiny.CHECKPOINT)
    text = json.loads((directory / "tokenizer.json").read_text())
    ids = set(text["model"]["vocab"].values()) | {a["id"] for a in text["added_tokens"]}
    assert ids == set(range(shape.VOCABULARY))
    config = read_config(directory)
    assert config["text_config"]["num_hidden_layers"] == 36
    assert config["image_token_id"] == read_config(tiny.CHECKPOINT)["image_token_id"]


async def test_the_shape_is_asked_about_images(tmp_path: Path) -> None:
    """By the gateway's own code: the tokenizer that it loads must mean what config.json says."""
    directory = shape.write(tmp_path / "m", tiny.CHECKPOINT)
    preparer = Preparer(GatewayConfig(model_dir=str(directory)))
    bundled = Preparer(GatewayConfig(model_dir=str(tiny.CHECKPOINT)))
    sample = base64.b64encode((tiny.SAMPLES / "label.png").read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{sample}"}}
    content = [{"type": "text", "text": "Hello"}, image]
    prompt = await preparer.chat([{"role": "user", "content": content}])
    known = await bundled.chat([{"role": "user", "content": content}])
    (item,) = prompt.items
    token = read_config(directory)["image_token_id"]
    assert prompt.token_ids[item.offset :][: item.num_rows] == (token,) * item.num_rows
    without = [tuple(i for i in p.token_ids if i != token) for p in (prompt, known)]
    assert without[0] == without[1]  # and so with every other word of the bundled model


def test_the_roofline_is_that_of_the_design(tmp_path: Path) -> None:
    """Milliseconds of arithmetic and of reading that were added up by hand for this shape."""
    directory = shape.write(tmp_path / "m", tiny.CHECKPOINT)
    configs = read_config(directory), read_preprocessor(directory)
    roofline = Roofline(CARDS["H200"], *configs)
    by_hand = {
        "text": (1024, 9.8, 17.6), "3x560": (1378, 17.3, 13.8), "1x1080p": (2106, 36.1, 8.4),
        "4x1080p": (9192, 177, 28),
    }  # fmt: skip
    for name, (tokens, arithmetic_ms, reading_ms) in by_hand.items():
        (stream,) = NAMED[name].streams
        found = roofline.request_s(stream, tokens)
        assert found is not None
        assert found[0] * 1e3 == pytest.approx(arithmetic_ms, rel=0.03)
        assert found[1] * 1e3 == pytest.approx(reading_ms, rel=0.08)
    eight = Roofline(CARDS["H200"], *configs, is_fp8=True)
    (stream,) = NAMED["1x1080p"].streams
    assert eight.requests_per_s(stream, 2106) > 1.2 * roofline.requests_per_s(stream, 2106)  # type: ignore[operator]
    (stream,) = NAMED["text"].streams
    reading_s = [
        Roofline(CARDS["H200"], *configs, has_fp8_kv=kv).request_s(stream, 1024)
        for kv in (False, True)
    ]
    assert reading_s[0][1] - reading_s[1][1] == pytest.approx(5.05e-3, rel=0.08)  # half of 43.5 GB
    assert roofline.requests_per_s(NAMED["mixed"].streams[1], 9000) is None
    assert card_of(["NVIDIA H200, driver 1"]) is CARDS["H200"]
    assert card_of(["NVIDIA H200"] * 2) is CARDS["H200"]
    for names in ([], ["a"], ["NVIDIA H200", "NVIDIA H100"], ["NVIDIA H200", "a"]):
        assert card_of(names) is None


def test_a_topology_is_bounded_by_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bounds: list[dict[str, Roofline]] = []
    monkeypatch.setattr("epd_lab.bench.machine.gpus", lambda: ["NVIDIA H200, driver 1"] * 4)
    monkeypatch.setattr(gpu, "run", lambda plan, out, found, **flags: bounds.append(found) or 0)
    parser = argparse.ArgumentParser()
    verb_gpu.add_to(parser.add_subparsers())
    given = ["gpu", "--out", str(tmp_path), "-tp", "2"]
    for topology in ("1epd", "1e1pd", "1p:tp2,1d:tp1,1e"):
        given += ["--topology", topology]
    verb_gpu.run(parser.parse_args(given))
    told = {name: (one.card, one.num_cards) for name, one in bounds[0].items()}
    card = CARDS["H200"]
    assert told == {"1epd": (card, 2), "1e1pd": (card, 3), "1p:tp2,1d:tp1,1e": (card, 4)}
    verb_gpu.run(parser.parse_args([*given, "--device", "cuda:0,cuda:1"]))
    shared = [one.num_cards for one in bounds[1].values()]
    assert shared == [2, 2, 2], "an encoder and a rank are on one card"


def test_of_a_mixture_what_is_chosen_is_read() -> None:
    """The sums are those that its name and its published size say."""
    text = shape._TEXT | shape.SIZES["30b-a3b"][0]
    one, head, *_ = roofline._sizes(text, 2)
    assert one + 2 * head == pytest.approx(3.3e9, rel=0.03)
    everyone, *_ = roofline._sizes(text, 2, 10_000)
    tower = 0.54e9
    assert everyone + 2 * head + tower == pytest.approx(31_070_754_032, rel=1e-3)
    hit = [roofline.experts_hit(128, 8, tokens) for tokens in (1, 8, 64)]
    assert hit == pytest.approx([8, 51.6, 125.9], abs=0.1)
    vision = shape._VISION | shape.SIZES["30b-a3b"][1]
    config = {"text_config": text, "vision_config": vision, "model_type": "qwen3_vl_moe"}
    (stream,) = NAMED["text"].streams
    whole, eight = (
        Roofline(CARDS["H200"], config, shape._IMAGES, is_fp8=fp8) for fp8 in (False, True)
    )
    found = whole.request_s(stream, 1024)
    assert found is not None and found[0] == pytest.approx(2 * one * 1024 / 790e12, rel=0.2)
    assert eight.request_s(stream, 1024) is None  # whose experts have sixteen


def test_of_linear_attention_states_are_read_and_written(tmp_path: Path) -> None:
    directory = shape.write(tmp_path / "m", tiny.CHECKPOINT, "qwen3.5-4b")
    config, preprocessor = read_config(directory), read_preprocessor(directory)
    text = config["text_config"]
    found = roofline._sizes(text, 2)
    tower = 0.33e9
    assert found.layers + found.head + tower == pytest.approx(4.54e9, rel=0.02), "as published"
    assert found.num_attending == 8 and found.state_nbytes == 24 * 32 * 128 * 128 * 4
    (stream,) = NAMED["text"].streams
    seconds = Roofline(CARDS["H200"], config, preprocessor).request_s(stream, 1024)
    assert seconds is not None
    weights = 2 * (found.layers + found.head) / 64
    each = weights + 2 * found.state_nbytes + found.kv_nbytes * 1152
    assert seconds[1] == pytest.approx(256 * each / 4.3e12)


@pytest.mark.parametrize("size", ["kimi-dense", "shared experts"])
def test_of_what_is_not_known_there_is_no_bound(size: str) -> None:
    text = shape._TEXT | shape.SIZES["kimi-dense"][0]
    if size == "shared experts":  # as Qwen3.5 has them: no layer is without experts
        text = shape._TEXT | {"num_experts": 256, "shared_expert_intermediate_size": 512}
        del text["intermediate_size"]
    (stream,) = NAMED["text"].streams
    config = {"text_config": text}
    assert Roofline(CARDS["H200"], config, {}).request_s(stream, 1024) is None


async def test_the_table_has_spread_and_share(
    measured: Callable[[dict[str, Told]], None], tmp_path: Path
) -> None:
    directory = shape.write(tmp_path / "m", tiny.CHECKPOINT)
    roofline = Roofline(CARDS["H200"], read_config(directory), read_preprocessor(directory))
    measured({"a": told("a", 1.0), "b": told("b", 2.0)})
    rooflines = {"a": roofline, "b": replace(roofline, num_cards=2)}
    found = await gpu.measure_all(plan("a", "b"), tmp_path, rooflines)
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("| a | text |")]
    assert "1.0 (1.0 to 1.0)" in line and "% of " in line
    one, two = (next(r for r in found["rows"] if r["server"] == name) for name in "ab")
    assert two["roofline"] == pytest.approx(2 * one["roofline"])
    assert len(gpu.markdown(found["rows"])) == 2 + 4
