"""Where the bytes of rows are: in the tower's device, pinned, or handed on without a copy."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from epd.config import EncodeConfig, EngineConfig, PrefillConfig
from epd.engine.base import MediaLayout, Rows, RowSpan, StepSequence
from epd.engine.device.streams import DeviceStreams
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.row_splice import LiftedRows
from epd.engine.vision.engine import TorchVisionEngine
from epd.roles.compose import Engines, Gateway, Instance
from epd.tiny import CHECKPOINT
from epd.transport.routing import RoutingTransferEngine
from tests.gpu.test_streams import DELAY_CYCLES
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import Question, answer, question
from tests.vllm.test_rows import rows_at_a_server

TIER_NBYTES = 64 << 20


class Gpu:
    """The bundled model on the device, with memory for rows there and pinned."""

    def __init__(self) -> None:
        config = EngineConfig(device="cuda", dtype="float32", kv_nbytes=64 << 20, threads=2)
        self.executor = build_executor(config)
        self.streams: DeviceStreams = self.executor.streams
        self.vision = build_vision(CHECKPOINT, config, self.executor)
        self.language = build_language(CHECKPOINT, config, self.executor, 16)


@pytest.fixture(scope="module")
def made(cuda: str) -> Gpu:
    return Gpu()


@pytest.fixture
def gpu(made: Gpu) -> Iterator[Gpu]:
    made.vision.reserve(TIER_NBYTES, TIER_NBYTES)
    yield made
    made.vision.reserve(0, 0)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    async def ask() -> list[Question]:
        texts = ("what?", "both", "how many?", "why?", "hello", "who?")
        return [await question(text, 1, max_tokens=12, seed=n) for n, text in enumerate(texts)]

    return asyncio.run(ask())


async def encoded(gpu: Gpu, asked: Question) -> Rows:
    """Of its first image."""
    prepared = asked.generation.items[0]
    patches = await gpu.vision.preprocess(prepared.image, prepared.grid_thw)
    (rows,) = await gpu.vision.encode([patches])
    assert isinstance(rows, Rows)
    return rows


async def test_rows_stay_where_the_tower_leaves_them(gpu: Gpu, questions: list[Question]) -> None:
    """On the device, then pinned, then on the device again: the same bytes, in the arenas that the
    plan has; and each piece returns when nobody has it any more."""
    rows = await encoded(gpu, questions[0])
    content = rows.tensor.cpu()
    assert gpu.streams.rows.holds(rows.tensor) and not rows.on_host
    host = await gpu.vision.to_host(rows)
    assert host.on_host and host.tensor.is_pinned() and gpu.streams.arena.holds(host.tensor)
    free = gpu.streams.rows.free_nbytes
    del rows
    gc.collect()
    assert gpu.streams.rows.free_nbytes > free, "demoted: the device's memory is free"
    again = await gpu.vision.to_device(host)
    assert gpu.streams.rows.holds(again.tensor)
    assert torch.equal(again.tensor.cpu(), content) and torch.equal(host.tensor, content)
    stored = Rows(bytes(host.buffer()), host.num_rows, host.nbytes)  # as a storage gives it
    assert torch.equal((await gpu.vision.to_device(stored)).tensor.cpu(), content)
    views = [memoryview(bytearray(host.nbytes))]
    await gpu.vision.copy_out(again, views)
    assert bytes(views[0]) == bytes(host.buffer())
    del host, again, stored
    gc.collect()
    for arena in (gpu.streams.rows, gpu.streams.arena):
        assert arena.free_nbytes == arena.nbytes


async def test_a_full_device_leaves_rows_pinned(gpu: Gpu, questions: list[Question]) -> None:
    """Nothing is taken from what the plan gave to others."""
    kept = gpu.streams.rows.take(torch.Size([gpu.streams.rows.nbytes]), torch.uint8)
    assert kept is not None
    await encoded(gpu, questions[0])  # what libraries keep for themselves from then on
    before = torch.cuda.memory_allocated()
    rows = await encoded(gpu, questions[0])
    assert rows.on_host and gpu.streams.arena.holds(rows.tensor)
    assert (await gpu.vision.to_device(rows)) is rows
    assert torch.cuda.memory_allocated() <= before


async def test_moves_wait_for_no_step(gpu: Gpu, questions: list[Question]) -> None:
    rows = await encoded(gpu, questions[0])
    content = rows.tensor.cpu()
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    host = await gpu.vision.to_host(rows)
    assert not torch.cuda.current_stream().query(), "the step is still running"
    assert torch.equal(host.tensor, content)


def cluster_of(gpu: Gpu, names: dict[str, tuple[str, ...]], **encode: Any) -> Cluster:
    """Each instance has the device's engines of its roles."""
    cluster = Cluster()
    for name, roles in names.items():
        sees, reads = "encode" in roles, "prefill" in roles
        cluster.add(
            name,
            roles,
            Engines(vision=gpu.vision if sees else None, language=gpu.language if reads else None),
            engine=EngineConfig(device="cuda", async_scheduling=True, prefix_caching=False),
            encode=EncodeConfig(**encode),
            prefill=PrefillConfig(pool_nbytes=2 * 64 * gpu.vision.contract.row_nbytes),
        )
    return cluster


async def ids(gateway: Gateway, asked: Question) -> list[int]:
    return [token.token_id for token in await answer(gateway, asked)]


def watch_steps(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """The rows that steps read, and bytes of rows that go up for them."""
    read: list[Any] = []
    uploads: list[int] = []
    step, upload, lift = gpu.language.step, gpu.streams.upload, gpu.streams.lift

    def watched(batch: Sequence[StepSequence], on_layers: Any = None) -> Any:
        read.extend(span.rows for sequence in batch for span in sequence.spans)
        return step(batch, on_layers)

    def counted(*pieces: torch.Tensor) -> torch.Tensor:
        if pieces[0].is_floating_point():  # pixels are bytes
            uploads.append(sum(piece.nbytes for piece in pieces))
        return upload(*pieces)

    def lifted(target: torch.Tensor, pieces: Sequence[torch.Tensor]) -> torch.cuda.Event:
        uploads.append(target.nbytes)
        return lift(target, pieces)

    monkeypatch.setattr(gpu.language, "step", watched)
    monkeypatch.setattr(gpu.streams, "upload", counted)
    monkeypatch.setattr(gpu.streams, "lift", lifted)
    return read, uploads


async def test_a_hand_over_within_a_process_is_a_reference(
    gpu: Gpu, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tower wrote is what the step reads: nothing comes down, and no row goes up."""
    cluster = cluster_of(gpu, {"epd0": ("encode", "prefill", "decode")})
    read, uploads = watch_steps(gpu, monkeypatch)
    moved: list[Rows] = []
    monkeypatch.setattr(TorchVisionEngine, "to_host", lambda self, rows: moved.append(rows))
    async with cluster.running() as gateway:
        said = await asyncio.gather(*(ids(gateway, one) for one in questions))
        await cluster.settle()
    assert said == [one.token_ids for one in questions]
    assert read
    assert not moved and not uploads
    assert all(isinstance(rows, Rows) and gpu.streams.rows.holds(rows.tensor) for rows in read)


async def test_rows_of_another_instance_go_up_when_they_arrive(
    gpu: Gpu, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come down once for the write, land in registered memory, and go up once from there."""
    monkeypatch.setattr(RoutingTransferEngine, "takes_references", lambda self, target: False)
    cluster = cluster_of(gpu, {"e0": ("encode",), "pd0": ("prefill", "decode")})
    read, uploads = watch_steps(gpu, monkeypatch)
    async with cluster.running() as gateway:
        said = await asyncio.gather(*(ids(gateway, one) for one in questions))
        await cluster.settle()
    assert said == [one.token_ids for one in questions]
    assert any(isinstance(rows, LiftedRows) for rows in read)
    assert not any(isinstance(rows, Rows) for rows in read)
    assert sum(uploads) == sum(one.generation.items[0].num_rows for one in questions) * (
        gpu.vision.contract.row_nbytes
    )


async def test_tiers_hold_what_their_books_say(gpu: Gpu, questions: list[Question]) -> None:
    """With room for one image on the device: the others go down, and up again when they are
    asked for; every image's bytes are where the books have it, and answers are exact."""
    row_nbytes = gpu.vision.contract.row_nbytes
    (num_rows,) = {item.num_rows for one in questions for item in one.generation.items}
    cluster = cluster_of(
        gpu,
        {"epd0": ("encode", "prefill", "decode")},
        cache_device_nbytes=num_rows * row_nbytes,
        cache_host_nbytes=TIER_NBYTES,
    )
    instance: Instance = cluster.instances["epd0"]
    encode = instance.encode
    assert encode is not None
    async with cluster.running() as gateway:
        for _ in range(2):
            for one in questions:
                assert await ids(gateway, one) == one.token_ids
            await cluster.settle()
            await until_at_rest(encode)
            look(gpu, encode)
        books = encode.tiers.books
        assert books.device.counts.evictions >= len(questions) - 1
        assert encode.num_encoded == len(questions), "the second time all of them were found"
        assert books.host.counts.hits > 0


async def until_at_rest(encode: Any) -> None:
    async with asyncio.timeout(10):
        while not all(machine.at_rest for machine in encode.encodings.values()):
            await asyncio.sleep(0.01)


def look(gpu: Gpu, encode: Any) -> None:
    books = encode.tiers.books
    on_device = {key for key, machine in encode.encodings.items() if not machine.rows.on_host}
    assert on_device and on_device == {key for key in encode.encodings if key in books.device.order}
    for machine in encode.encodings.values():
        tensor = machine.rows.tensor
        arena = gpu.streams.arena if machine.rows.on_host else gpu.streams.rows
        assert arena.holds(tensor)
    held = sum(encode.encodings[key].rows.nbytes for key in on_device)
    assert held == books.device.order.used <= books.device.order.capacity


async def test_rows_are_the_same_wherever_they_lie(gpu: Gpu, questions: list[Question]) -> None:
    """On the device, pinned, bytes of a storage, views of a receive pool: the same logits."""
    one = questions[0]
    rows = await encoded(gpu, one)
    host = await gpu.vision.to_host(rows)
    item = one.generation.items[0]
    ids = list(one.generation.token_ids)
    blocks = list(range(-(-len(ids) // gpu.language.kv_layout.block_size)))
    found = []
    for held in (rows, host, replace(host, tensor=bytes(host.buffer())), [host.buffer()]):
        rope = gpu.language.rope_positions(
            len(ids), [MediaLayout(item.offset, item.num_rows, item.grid_thw)]
        )
        span = RowSpan(item.offset, 0, item.num_rows, held)
        sequence = StepSequence(
            "r", ids, 0, blocks, rope.positions, spans=[span], sample=one.generation.sampling
        )
        found.append(gpu.language.logits([sequence]))
    assert all(torch.equal(logits, found[0]) for logits in found)


async def test_rows_at_a_worker_of_vllm_are_those_of_the_tower(gpu: Gpu) -> None:
    """Two pictures, through host memory; the HTTP side of the server is a fake."""
    await rows_at_a_server(gpu.vision, "cuda")
