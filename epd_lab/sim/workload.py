"""Requests as data, drawn from a seed: absolute times and stable ids, so that leaving one out
changes no other."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import msgspec

from epd.frontend import NO_ADAPTER, Adapter, Generation, PreparedItem, Stage, TimeLimits
from epd.messages import SamplingParams, TokenLogprobs
from epd_lab.sim import wishes
from epd_lab.sim.core.rand import KeyedRandom, draw_integer
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.engine.sampler import EOS, FIRST_WORD

WHOLE = 4  # tokens per word of answers that nobody reads as they grow
GRIDS = ((1, 2, 4), (1, 4, 4), (1, 4, 8), (1, 8, 8))
UNEVEN = ((1, 2, 4), (1, 4, 6), (1, 6, 6), (1, 6, 10))  # whose last slot is never full


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    index: int
    at_s: float
    text: tuple[int, ...]  # token ids without placeholders
    images: tuple[tuple[int, Image], ...] = ()  # (position in text, image)
    max_tokens: int = 8
    seed: int = 0
    stops_at_eos: bool = True
    cancel_after_s: float = 0.0  # the client hangs up this long after asking; 0: never
    wants_timeline: bool = False
    num_words: int = 0  # that its answer is made of: with few it repeats itself; 0: all there are
    tokens_per_word: int = 1  # more: the client wants its answer whole
    drives: bool = False  # encode, prefill and decode one by one, as a proxy does
    leaves_after: Stage = ""  # so many stages, and it is never heard of again
    num_returns: int = 0  # when it is refused, it comes back when it was told to, so often
    tenant: str = ""  # who asks: nobody else finds what was computed for it
    adapter: Adapter = NO_ADAPTER  # that it names
    limits: TimeLimits | None = None  # how long it waits; None: as the settings say
    wishes: SamplingParams = wishes.SEEDED  # all else that it wants of its answer
    stop_word: int = 0  # when it reads this word, it has enough (a stop string); 0: never

    def __str__(self) -> str:
        images = ", ".join(image.name for _, image in self.images) or "none"
        hangs_up = f", hangs up after {self.cancel_after_s:.3f} s" if self.cancel_after_s else ""
        wanted = wishes.told(self.wishes) + (", stops at a word" if self.stop_word else "")
        return (
            f"request {self.index} at {self.at_s:.4f} s: {len(self.text)} words, images: "
            f"{images}, up to {self.max_tokens} tokens{wanted}{hangs_up}"
        )

    def placed(self) -> tuple[tuple[int, ...], tuple[tuple[int, Image], ...]]:
        """Token ids with expanded placeholders, and images with their offsets there."""
        token_ids: list[int] = []
        placed: list[tuple[int, Image]] = []
        images = list(self.images)
        for position in range(len(self.text) + 1):
            while images and images[0][0] == position:
                image = images.pop(0)[1]
                placed.append((len(token_ids), image))
                token_ids += [golden.IMAGE_TOKEN] * image.num_rows
            if position < len(self.text):
                token_ids.append(self.text[position])
        return tuple(token_ids), tuple(placed)

    def sampling(self) -> SamplingParams:
        own = self.wishes.stop_token_ids
        return msgspec.structs.replace(
            self.wishes,
            max_tokens=self.max_tokens,
            top_k=self.wishes.top_k or self.num_words,
            seed=self.seed,
            stop_token_ids=(EOS, *own) if self.stops_at_eos else own,
            tokens_per_word=self.tokens_per_word if self.limits is None else 1,
        )

    def stages(self) -> tuple[Stage, ...]:
        """What it asks for, in order; the last one is the answer."""
        if not self.drives:
            return ("",)
        every: tuple[Stage, ...] = ("encode", "prefill", "") if self.images else ("prefill", "")
        return every[: every.index(self.leaves_after) + 1] if self.leaves_after in every else every

    def generation(self, stage: Stage = "", claim: str = "") -> Generation:
        token_ids, placed = self.placed()
        items = tuple(
            PreparedItem(
                mm_hash_of(p), at, p.num_rows, p.grid_thw, p.image(), pixels_nbytes=p.pixels_nbytes
            )
            for at, p in placed
        )
        sampling = self.sampling()
        if stage:
            sampling = msgspec.structs.replace(sampling, max_tokens=1)
        return Generation(
            token_ids, items, sampling, wants_timeline=self.wants_timeline, scope=self.tenant,
            stage=stage, claim=claim, adapter=self.adapter,
        )  # fmt: skip

    def said(self) -> tuple[TokenLogprobs, ...]:
        """The right answer, with the log-probabilities that were asked for."""
        token_ids, placed = self.placed()
        return golden.answer(token_ids, placed, self.sampling(), self.adapter.digest)

    def answer(self) -> tuple[int, ...]:
        """The token ids of the right answer."""
        return tuple(token.token_id for token in self.said())


@functools.lru_cache(maxsize=4096)
def mm_hash_of(image: Image) -> str:
    """64 hex digits, as the gateway's own hash."""
    content = image.image() + image.adapter.encode()
    words = (draw_integer(0, "hash", content, n) for n in range(4))
    return "".join(f"{word:016x}" for word in words)


@dataclass(frozen=True, slots=True)
class Workload:
    """How to draw asks; times in seconds."""

    num_requests: int = 12
    start_s: float = 1.0
    spread_s: float = 1.0
    image_share: float = 0.7
    max_images: int = 3
    num_images: int = 6  # few: images repeat between requests
    max_text: int = 20
    max_tokens: int = 12
    cancel_share: float = 0.0
    broken_share: float = 0.0
    slow_share: float = 0.0
    num_texts: int = 0  # few: texts, and the places of images in them, repeat; 0: all differ
    timeline_share: float = 0.25
    num_words: int = 0  # of a conversation, its turns' ends besides; 0: one turn, any words
    whole_share: float = 0.5  # of clients that do not want a stream
    num_tenants: int = 1
    crowd: int = 1  # requests of the first tenant for one of each other, which then has no images
    num_returns: int = 0
    adapters: tuple[str, ...] = ()  # that clients name, or none
    of_towers: tuple[str, ...] = ()  # of these, those that change the tower
    limits: TimeLimits | None = None
    drive_share: float = 0.0  # of clients that drive the stages of their requests themselves
    leave_share: float = 0.0  # of these, who leave between two stages
    kinds: tuple[str, ...] = wishes.MIXED  # of wishes
    stop_share: float = 0.0  # of clients with a stop string, one word of few
    grids: tuple[tuple[int, int, int], ...] = GRIDS  # of images, in turn

    def draw(self, random: KeyedRandom) -> tuple[Ask, ...]:
        asks = (self.ask(random.stream("ask", index), index) for index in range(self.num_requests))
        return tuple(asks)

    def ask(self, random: KeyedRandom, index: int) -> Ask:
        """One request; `random` is its own."""
        drawn = random
        if self.num_texts:  # the same draws for all asks of one text
            drawn = KeyedRandom(0, "text", random.below(self.num_texts, "which text"))
        length = 1 + drawn.below(self.max_text, "length")
        text = tuple(self._word(drawn, n) for n in range(length))
        name = random.pick(("", *self.adapters), "adapter")
        adapter = Adapter(name, name, name in self.of_towers)
        of_rows = name if name in self.of_towers else ""
        images: list[tuple[int, Image]] = []
        tenant = self._tenant(random)
        if random.chance(self.image_share, "image") and (self.crowd == 1 or tenant == "tenant0"):
            count = 1 + drawn.below(self.max_images, "count")
            spots = sorted(drawn.below(length + 1, "spot", n) for n in range(count))
            images = [
                (spot, replace(self._image(random, n), adapter=of_rows))
                for n, spot in enumerate(spots)
            ]
        cancels = random.chance(self.cancel_share, "cancel")
        wanted = wishes.draw(random.stream("wishes"), self.kinds, self.num_words)
        return Ask(
            index, self.start_s + self.spread_s * random.uniform("at"), text, tuple(images),
            max_tokens=1 + random.below(self.max_tokens, "tokens"),
            seed=random.below(1 << 31, "seed"), stops_at_eos=random.chance(0.8, "eos"),
            cancel_after_s=0.001 + 0.3 * random.uniform("hang up") if cancels else 0.0,
            wants_timeline=random.chance(self.timeline_share, "timeline"), num_words=self.num_words,
            tokens_per_word=WHOLE if random.chance(self.whole_share, "whole") else 1,
            limits=self.limits, tenant=tenant, num_returns=self.num_returns,
            drives=random.chance(self.drive_share, "drives"),
            leaves_after=self._leaves_after(random), wishes=wanted,
            adapter=adapter,
            stop_word=self._stop_word(random, wanted.top_k or self.num_words),
        )  # fmt: skip

    def _tenant(self, random: KeyedRandom) -> str:
        drawn = random.below(self.num_tenants - 1 + self.crowd, "tenant")
        return f"tenant{max(0, drawn + 1 - self.crowd)}"

    def _stop_word(self, random: KeyedRandom, num_words: int) -> int:
        if not random.chance(self.stop_share, "stops"):
            return 0
        return FIRST_WORD + random.below(num_words or wishes.FEW_WORDS, "stop word")

    def _leaves_after(self, random: KeyedRandom) -> Stage:
        if not random.chance(self.leave_share, "leaves"):
            return ""
        return "encode" if random.chance(0.5, "early") else "prefill"

    def _word(self, drawn: KeyedRandom, n: int) -> int:
        if not self.num_words:
            return FIRST_WORD + drawn.below(900, "text", n)
        word = drawn.below(self.num_words + 1, "text", n)
        return FIRST_WORD + word if word < self.num_words else EOS

    def _image(self, random: KeyedRandom, n: int) -> Image:
        number = random.below(self.num_images, "picture", n)
        grid = self.grids[number % len(self.grids)]
        if random.chance(self.broken_share, "broken", n):
            return Image(f"bad{number}", grid, ("broken", "unencodable")[number % 2])
        if random.chance(self.slow_share, "slow", n):
            return Image(f"slow{number}", grid, "slow")
        return Image(f"pic{number}", grid)
