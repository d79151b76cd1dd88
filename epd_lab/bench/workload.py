"""What a load generator sends: shapes of requests, how they arrive, and the bodies themselves.

The named workloads are those that vLLM's `bench serve` publishes for vision-language models
(`random-mm`): random words, and unique JPEGs of noise, which no codec can shrink and no cache has
seen.  `mixed` is the case for which stages are separated: people who chat, and bursts of heavy
images.  `reuse-50` repeats half of its images.  `pages` is what readers of documents send: unlike
noise, a scanned page is small as a JPEG, and quickly decoded.

Bodies are made before the clock starts.  Everything is drawn from keys, so that two servers get the
same requests and no repeat finds its images in a cache.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epd.cli.parser import UsageError

FULL_HD = (1920, 1080)
A4 = (2480, 3508)  # at 300 dots per inch
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word"
).split()


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of request; sizes are width and height in pixels."""

    text_tokens: int
    output_tokens: int
    images: int = 0
    size: tuple[int, int] = (560, 560)
    is_page: bool = False  # images are of words instead of noise
    repeated: float = 0.0  # share of images that were sent before
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Closed:
    """Each of `concurrency` users asks again when answered."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class Poisson:
    """An open loop: `per_s` requests a second on average, whatever the server does."""

    per_s: float


@dataclass(frozen=True, slots=True)
class Bursts:
    """`size` requests at once, every `every_s`."""

    size: int
    every_s: float


Arrival = Closed | Poisson | Bursts


@dataclass(frozen=True, slots=True)
class Stream:
    """`count` requests of one shape."""

    name: str
    shape: Shape
    arrival: Arrival
    count: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams that run at the same time; `file` replaces the bodies of the only one."""

    name: str
    streams: tuple[Stream, ...]
    file: Path | None = None


def _one(name: str, shape: Shape, concurrency: int, count: int) -> Workload:
    return Workload(name, (Stream(name, shape, Closed(concurrency), count),))


_THREE = Shape(400, 128, images=3)
NAMED = {
    workload.name: workload
    for workload in (
        _one("text", Shape(1024, 256), 64, 256),
        _one("text-c1", Shape(1024, 256), 1, 6),
        _one("3x560", _THREE, 32, 192),
        _one("3x560-c1", _THREE, 1, 12),
        _one("1x1080p", Shape(64, 64, 1, FULL_HD), 32, 160),
        *(
            _one(f"1x1080p-{tokens}", Shape(64, tokens, 1, FULL_HD), 32, 160)
            for tokens in (128, 256)
        ),
        _one("4x1080p", Shape(1024, 64, 4, FULL_HD), 16, 48),
        Workload(
            "mixed",
            (
                Stream("chat", Shape(1024, 256), Closed(16), 128),
                Stream("burst", Shape(400, 64, 4, FULL_HD), Bursts(8, 5.0), 24),
            ),
        ),
        *(
            _one(f"reuse-{percent}", replace(_THREE, repeated=percent / 100), 32, 192)
            for percent in (0, 20, 50, 90)
        ),
        _one("pages", Shape(16, 1024, 1, A4, is_page=True), 64, 256),
        _one("small", Shape(64, 24, 1, (112, 112)), 4, 24),
    )
}


def named(name: str) -> Workload:
    """A workload by name, or from a file of requests, one chat-completions body per line.

    `text@30` is the workload `text` with 30 arrivals a second in its first stream, without users.

    Raises ValueError with what there is.
    """
    if name in NAMED:
        return NAMED[name]
    known, _, rate = name.partition("@")
    if known in NAMED and rate.replace(".", "", 1).isdecimal() and float(rate) > 0:
        workload = changed(NAMED[known], Poisson(float(rate)), None)
        first, *rest = workload.streams
        alone = [replace(first, name=name)] if first.name == known else [first]
        return Workload(name, (*alone, *rest))
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"there is no workload and no file {name!r}; choose one of {', '.join(NAMED)}, or a "
            "file with one chat-completions body per line"
        )
    count = sum(bool(line.strip()) for line in path.read_text().splitlines())
    stream = Stream(path.stem, Shape(0, 0), Closed(16), count)
    return Workload(path.stem, (stream,), path)


def changed(workload: Workload, arrival: Arrival | None, count: int | None) -> Workload:
    """The same with another arrival or count, in its first stream."""
    first, *rest = workload.streams
    first = replace(first, arrival=arrival or first.arrival, count=count or first.count)
    return replace(workload, streams=(first, *rest))


def at_most(workload: Workload, count: int) -> Workload:
    """The same with no more requests in each stream."""
    return _each(workload, lambda stream: replace(stream, count=min(stream.count, count)))


def chosen(names: Sequence[str], *, users: int = 1, times: int = 1) -> list[Workload]:
    """By name, with so many times the users, and then so many times the requests of each stream.  A
    longer run has a smaller part of beginning, when all users ask at once, and of end, when few are
    left.  Raises ValueError with the names that there are, and if a file is to be sent several
    times."""
    return [_larger(named(name), users, times) for name in names]


def _larger(workload: Workload, users: int, times: int) -> Workload:
    if workload.file is None:
        times *= users
    elif times > 1:
        raise ValueError(f"{workload.file} is sent once, without --times; repeat its lines instead")
    return _each(workload, lambda s: replace(crowded(s, users), count=s.count * times))


def users_of(num_gpus: int) -> int:
    """As many to a GPU as two GPUs have."""
    return max(1, num_gpus // 2)


def crowded(stream: Stream, times: float) -> Stream:
    """The same with so many times as many who ask at a time, at least one."""
    match stream.arrival:
        case Closed(concurrency):
            arrival: Arrival = Closed(max(1, round(concurrency * times)))
        case Poisson(per_s):
            arrival = Poisson(per_s * times)
        case Bursts(size, every_s):
            arrival = Bursts(max(1, round(size * times)), every_s)
    return replace(stream, arrival=arrival)


def drawn(workload: Workload) -> Workload:
    """The same with answers that are drawn, instead of greedy."""
    return _each(workload, lambda s: replace(s, shape=replace(s.shape, temperature=1.0)))


def _each(workload: Workload, change: Callable[[Stream], Stream]) -> Workload:
    return replace(workload, streams=tuple(map(change, workload.streams)))


# --- bodies ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wording:
    """Words per token of the served model, as its answer to a probe showed."""

    words_per_token: float

    def text(self, tokens: int, key: str) -> str:
        draw = random.Random(key)
        return " ".join(draw.choices(WORDS, k=max(1, round(tokens * self.words_per_token))))


@functools.lru_cache(maxsize=4)
def _noise_base(width: int, height: int) -> Any:
    import numpy as np

    return np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8)


def noise_jpeg(size: tuple[int, int], number: int) -> bytes:
    """A JPEG of noise that is unlike any other number's: shifted, and its number written in."""
    import numpy as np
    from PIL import Image

    width, height = size
    pixels = np.roll(_noise_base(width, height), (number * 7919) % (width * height), axis=0)
    stamp = np.frombuffer(number.to_bytes(8, "little"), np.uint8).repeat(64)
    pixels.reshape(-1)[: stamp.size] = stamp[: pixels.size]
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=75)
    return out.getvalue()


@functools.lru_cache(maxsize=4)
def _lines(width: int, height: int) -> list[Any]:
    """Images of lines of 14 words, 54 of which fill a page of this size."""
    from PIL import Image, ImageDraw, ImageFont

    font, words = ImageFont.load_default(max(1, height // 84)), random.Random(7)
    found = []
    for _ in range(200):
        line = Image.new("RGB", (width * 5 // 6, height * 5 // 6 // 54), "white")
        ImageDraw.Draw(line).text((0, 0), " ".join(words.choices(WORDS, k=14)), "black", font)
        found.append(line)
    return found


def page_jpeg(size: tuple[int, int], number: int) -> bytes:
    """A JPEG of about 750 words, black on white; another number has other lines."""
    from PIL import Image

    width, height = size
    page, lines = Image.new("RGB", size, "white"), _lines(*size)
    for place, line in enumerate(random.Random(number).choices(lines, k=54)):
        page.paste(line, (width // 12, height // 12 + place * line.height))
    out = io.BytesIO()
    page.save(out, "JPEG", quality=75)
    return out.getvalue()


def image_numbers(stream: Stream, repeat: int) -> list[list[int]]:
    """Per request the numbers of its images: new ones, or (`repeated`) ones sent before.

    No two streams have any in common, or the second one would find its prompts' beginnings in the
    prefix cache of the server that has answered the first.
    """
    draw = random.Random(f"{stream.name} {repeat}")
    first = next_number = (zlib.crc32(stream.name.encode()) << 30) + (repeat + 1) * 1_000_000
    requests = []
    for _ in range(stream.count):
        numbers = []
        for _ in range(stream.shape.images):
            if next_number > first and draw.random() < stream.shape.repeated:
                numbers.append(draw.randrange(first, next_number))
            else:
                numbers.append(next_number)
                next_number += 1
        requests.append(numbers)
    return requests


def bodies(
    workload: Workload, stream: Stream, wording: Wording, repeat: int, made: Callable[[int], None]
) -> list[bytes]:
    """The bodies of one stream; `made` gets their number so far."""
    if workload.file is not None:
        lines = [line for line in workload.file.read_text().splitlines() if line.strip()]
        asked = [json.loads(line) for line in lines[: stream.count]]
        if not all(isinstance(one, dict) for one in asked) or not asked:
            raise UsageError(
                f"--workload {workload.file}: write a JSON object a line, at least one"
            )
        return [json.dumps(one | _STREAMED).encode() for one in asked]
    numbers = image_numbers(stream, repeat)
    shape, found = stream.shape, []
    draw = page_jpeg if shape.is_page else noise_jpeg
    with ThreadPoolExecutor() as pool:  # PIL lets go of the interpreter
        for index, urls in enumerate(
            pool.map(lambda wanted: [image_url(shape.size, n, draw) for n in wanted], numbers)
        ):
            text = wording.text(shape.text_tokens, f"{stream.name} {repeat} {index}")
            found.append(chat_body(text, urls, shape.output_tokens, shape.temperature))
            made(len(found))
    return found


_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def chat_body(
    text: str,
    image_urls: list[str],
    output_tokens: int,
    temperature: float = 0.0,
    before: str = "",
) -> bytes:
    """A streamed chat completion of exactly `output_tokens`; `before`: text in front of images."""
    content: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    content += [{"type": "image_url", "image_url": {"url": url}} for url in image_urls]
    content.append({"type": "text", "text": text})
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": output_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        **_STREAMED,
    }
    return json.dumps(body).encode()


def image_url(
    size: tuple[int, int],
    number: int,
    draw: Callable[[tuple[int, int], int], bytes] = noise_jpeg,
) -> str:
    """An image as a data URL."""
    return "data:image/jpeg;base64," + base64.b64encode(draw(size, number)).decode()
