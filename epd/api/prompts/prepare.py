"""From a validated request to a prompt: media measured, template rendered, ids expanded."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from epd.api.answers.detokenize import Detokenizer, Vocabulary
from epd.api.asked.chat_message import ChatMessage, MessagePart
from epd.api.asked.reasoning import Place, place_of
from epd.api.asked.structured import Constraint
from epd.api.asked.template_flags import NO_FLAGS, TemplateFlags
from epd.api.asked.tools import Tool, ToolUse
from epd.api.http.data_url import Bound, data_nbytes, image_bound, is_data_url, video_bound
from epd.api.http.errors import bad_request
from epd.api.http.exchange import together, while_wanted
from epd.api.http.identity import scope_of
from epd.api.http.rarely import fetched
from epd.api.prompts.chat import ChatRenderer
from epd.api.prompts.continued import begun
from epd.api.prompts.media import MediaFetcher
from epd.api.prompts.medium import Measurer, Medium, Source
from epd.api.prompts.model_texts import sampling_defaults
from epd.config import GatewayConfig
from epd.frontend import NO_ADAPTER, Adapter, Metric, PreparedItem
from epd.media_files.image_opening import load_pillow
from epd.media_files.video import DEFAULT_SAMPLING, Sampling
from epd.messages import PixelBounds

if TYPE_CHECKING:
    from epd.api.expendable.grammar_proofs import GrammarProofs
    from epd.model_files.lora import AdapterFiles

T = TypeVar("T")

NUM_THREADS = 2
INLINE_CHARS = 2048  # shorter text is rendered on the loop: cheaper than a trip to a thread
PART_CHARS = 32  # what a message, a part or a tool weighs besides its text
INLINE_NBYTES = 64 << 10  # likewise for base64, hashing and reading a header


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids with placeholders expanded to rows, and the images and videos behind them."""

    token_ids: tuple[int, ...]
    items: tuple[PreparedItem, ...]
    scope: str  # who shares what is computed of it
    fetches: tuple[tuple[float, float], ...] = ()  # wall-clock times of each medium's fetching
    reasoning: Place = Place.BEHIND  # where its answer begins
    num_pixels: int = 0  # of its images and videos, as they are sent

    def truncated(self, num_tokens: int) -> Prompt:
        """Its last tokens.  Raises ApiError: rows of an image cannot be cut."""
        if len(self.token_ids) <= num_tokens:
            return self
        if self.items:
            name = "truncate_prompt_tokens"
            message = f"{name} {num_tokens} would cut a prompt with images or videos; shorten it"
            raise bad_request(message, name)
        return replace(self, token_ids=self.token_ids[-num_tokens:])


@dataclass(frozen=True, slots=True)
class _Part:
    """An image or a video of a request, not fetched yet; `param` names it in errors."""

    urls: tuple[str, ...]
    param: str
    is_image: bool = True
    is_file: bool = False  # a video that is one file, not its frames
    sampling: Sampling = DEFAULT_SAMPLING
    bounds: PixelBounds | None = None  # of an image

    @property
    def params(self) -> list[str]:
        """The name of each URL."""
        one = self.is_image or self.is_file
        return [self.param] if one else [f"{self.param}[{i}]" for i in range(len(self.urls))]


class Preparer:
    """The gateway's view of its model; free of torch."""

    def __init__(self, config: GatewayConfig) -> None:
        directory = Path(config.model_dir)
        self._config = config
        self._renderer = ChatRenderer(
            directory, config.chat_template, escapes=config.special_tokens_in_content == "escape"
        )
        self._measurer = Measurer(directory, self._renderer.config, config.limits)
        self._fetcher = MediaFetcher(config.limits)
        self._vocabulary = Vocabulary(self._renderer.tokenizer)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="epd-prepare")
        # Of their own: an image does not wait for somebody's film, nor a text for either.
        self._films = ThreadPoolExecutor(1, thread_name_prefix="epd-films")
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="epd-render")
        text = self._renderer.config.get("text_config") or self._renderer.config
        self.model_name = config.model_name or directory.resolve().name
        self.served_names = (self.model_name, *config.model_aliases)
        self.adapters: Mapping[str, Adapter] = {}
        if (lora := config.engine.lora).modules:
            from epd.model_files.lora import read_all

            found = read_all(lora.modules, lora.max_lora_rank)
            self.adapters = {name: self.adapter(name, files) for name, files in found.items()}
        self.max_context = int(text.get("max_position_embeddings", 4096))
        self.vocab_size = int(text.get("vocab_size", self._renderer.tokenizer.get_vocab_size()))
        self.takes_images = self._renderer.image_token_id is not None
        self.reasoning_parser: str = config.reasoning_parser
        self.call_form = self._renderer.call_form
        self._proofs: GrammarProofs | None = None  # with the first grammar
        self._config = config
        if self.takes_images:
            load_pillow()  # now, not in the first request
        self.eos_token_ids = self._renderer.end_token_ids
        self.defaults: Mapping[str, object] = sampling_defaults(directory)

    def adapter(self, name: str, files: AdapterFiles) -> Adapter:
        kind = str(self._renderer.config.get("model_type"))
        return Adapter(name, files.digest, files.changes_tower(kind))

    async def close(self) -> None:
        await self._fetcher.close()
        if self._proofs is not None:
            await self._proofs.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._films.shutdown(wait=False, cancel_futures=True)
        self._texts.shutdown(wait=False, cancel_futures=True)

    # --- prompts ----------------------------------------------------------------------------------

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        tenant: str = "",
        flags: TemplateFlags = NO_FLAGS,
        adapter: Adapter = NO_ADAPTER,
    ) -> Prompt:
        """The prompt of a conversation.  Raises ApiError.

        `tools`: those that may be called.  `tenant`: see `identity.tenant_of`.
        """
        limits = self._config.limits
        enough = 1 + limits.max_images + limits.max_videos  # of one kind, these are too many
        parts = tuple(itertools.islice(_media_parts(messages), enough))
        self._check_media(parts)
        scope = self._scope(tenant, adapter)
        fetches: list[tuple[float, float]] = []

        async def fetch(part: _Part) -> Medium:
            began_s = time.time()
            medium = await self._medium(part, scope)
            fetches.append((began_s, time.time()))
            return medium

        media = await together(fetch, parts)
        ids, items, place = await self._text_work(
            _weight(messages, tools), self._build, messages, tools, flags, media
        )
        num_pixels = sum(medium.num_pixels for medium in media)
        return Prompt(ids, items, scope, tuple(fetches), place, num_pixels)

    def _build(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        flags: TemplateFlags,
        media: Sequence[Medium],
    ) -> tuple[tuple[int, ...], tuple[PreparedItem, ...], Place]:
        """The prompt's ids and items, and where its answer begins.  Raises ApiError."""
        images = [medium for medium in media if medium.clip is None]
        videos = [medium for medium in media if medium.clip is not None]
        text = self._renderer.render(messages, tools, flags)
        text = self._renderer.tiled(text, [image.geometry.tiles for image in images])
        if any(video.texts for video in videos):
            text = self._renderer.spread(text, [video.texts for video in videos])
        ids = self._encode(text, "messages", add_special_tokens=False)
        of_images, of_videos = ([n for m in kind for n in m.runs] for kind in (images, videos))
        as_images = bool((how := self._measurer.video) and how.rows_are_images)
        found = self._renderer.expand(ids, of_images, of_videos, as_images=as_images)
        expanded, offsets, starts = found
        places = itertools.chain(offsets, starts)
        items = [_item(m, *itertools.islice(places, len(m.runs))) for m in (*images, *videos)]
        in_order = tuple(sorted(items, key=lambda item: item.offset))
        said = begun(messages) if flags.is_continued else ""
        return tuple(expanded), in_order, place_of(self.reasoning_parser, text, said)

    def _check_media(self, parts: Sequence[_Part]) -> None:
        """What this model and these limits do not take is refused before it is fetched."""
        limits = self._config.limits
        images = [part for part in parts if part.is_image]
        videos = [part for part in parts if not part.is_image]
        if images and not self.takes_images:
            raise bad_request("this model takes no images; send text only", images[0].param)
        if videos and (self._measurer.video is None or self._renderer.video_token_id is None):
            kind = self._renderer.config.get("model_type")
            raise bad_request(f"this model takes no videos ({kind}); send images", videos[0].param)
        for what, found, limit in (
            ("images", images, limits.max_images),
            ("videos", videos, limits.max_videos),
        ):
            if len(found) > limit:
                raise bad_request(
                    f"the request has too many {what}; at most {limit} are taken",
                    found[limit].param,
                )
        for part in videos:
            if len(part.urls) > limits.max_video_frames:
                raise bad_request(
                    f"{part.param} has {len(part.urls)} frames; at most "
                    f"{limits.max_video_frames} are taken",
                    part.param,
                )

    def _scope(self, tenant: str, adapter: Adapter = NO_ADAPTER) -> str:
        return scope_of(self._config.cache_scope, self._config.tenant, tenant, adapter.of_rows)

    async def completion(self, prompt: str | Sequence[int], tenant: str = "") -> Prompt:
        """The prompt of a plain completion.  Raises ApiError."""
        ids = await self._text_work(len(prompt), self._complete, prompt)
        return Prompt(ids, (), self._scope(tenant))

    def _complete(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids: Sequence[int] = self._encode(prompt, "prompt", add_special_tokens=True)
        else:
            ids = prompt
        if not ids:
            raise bad_request("prompt is empty; send at least one token", "prompt")
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < self.vocab_size:
                raise bad_request(
                    f"prompt holds token id {bad}; ids are 0 to {self.vocab_size - 1}", "prompt"
                )
        expanded, _, _ = self._renderer.expand(ids, (), param="prompt")
        return tuple(expanded)

    async def _text_work(self, weight: int, function: Callable[..., T], *arguments: object) -> T:
        """Call it, on a thread if that takes long."""
        if weight <= INLINE_CHARS:
            return function(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._texts, while_wanted(function), *arguments)

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self.max_context:
            self._check_length(text, param)
        return self._renderer.encode(
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=self.max_context,
            param=param,
        )

    def _check_length(self, text: str, param: str) -> None:
        """Text that cannot fit is refused before megabytes of it are tokenized."""
        at_least = len(text) // self._longest_token_chars
        if at_least > self.max_context:
            raise bad_request(
                f"the context holds {self.max_context} tokens, and this text of {len(text)} "
                f"characters needs at least {at_least}; shorten it",
                param,
                "context_length_exceeded",
            )

    @cached_property
    def _longest_token_chars(self) -> int:
        return max(map(len, self._renderer.tokenizer.get_vocab()), default=1)

    async def _medium(self, part: _Part, scope: str) -> Medium:
        """Decode base64, read the header, hash: a short image at once, all else on a thread."""
        limits = self._config.limits
        bound = video_bound(limits) if part.is_file else image_bound(limits)
        named = [(u, bound, p) for u, p in zip(part.urls, part.params, strict=True)]
        sources = await together(lambda one: self._source(*one), named)
        if part.is_image and data_nbytes(sources[0]) <= INLINE_NBYTES:
            return self._measurer.image(sources[0], part.param, scope, part.bounds)
        loop = asyncio.get_running_loop()
        measure = while_wanted(self._measure)
        threads = self._films if part.is_file else self._threads
        return await loop.run_in_executor(threads, measure, part, sources, scope)

    async def _source(self, url: str, bound: Bound, param: str) -> Source:
        return url if is_data_url(url) else await self._fetcher.fetch(url, bound, param)

    def _measure(self, part: _Part, sources: Sequence[Source], scope: str) -> Medium:
        if part.is_image:
            return self._measurer.image(sources[0], part.param, scope, part.bounds)
        if part.is_file:
            return self._measurer.file(sources[0], part.sampling, part.param, scope)
        return self._measurer.frames(sources, part.sampling.fps, part.params, scope)

    async def grammar(self, constraint: Constraint | ToolUse, tenant: str = "") -> str:
        """The text that constrains the answer.  Raises ApiError."""
        proofs = await fetched("epd.api.expendable.grammar_proofs:GrammarProofs")
        if self._proofs is None:
            additional = self._config.additional_properties
            directory = Path(self._config.model_dir)
            self._proofs = proofs(directory, self.vocab_size, additional)
        return await self._proofs.grammar(constraint, self._scope(tenant))

    def samples(self) -> Iterator[Metric]:
        return self._proofs.samples() if self._proofs is not None else iter(())

    # --- text -------------------------------------------------------------------------------------

    async def tokens(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The ids of a text.  Raises ApiError."""
        encode = partial(self._encode, add_special_tokens=add_special_tokens)
        return await self._text_work(len(text), encode, text, "prompt")

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of words, at the start of a text and behind a space, as in vLLM."""
        found: list[tuple[int, ...]] = []
        for word in words:
            plain, spaced = (
                tuple(self._renderer.encode(text, add_special_tokens=False))
                for text in (word.lstrip(), " " + word.lstrip())
            )
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(found)

    async def text(self, token_ids: Sequence[int]) -> str:
        """What the ids spell, special tokens too: the other way round than `tokens`."""
        decode = partial(self._renderer.tokenizer.decode, skip_special_tokens=False)
        return await self._text_work(len(token_ids), decode, token_ids)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """As the vocabulary writes them; empty for an id that has none."""
        return [self._renderer.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return self._vocabulary.detokenizer(skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, as log-probabilities show it: text (may be broken) and its bytes."""
        return self._vocabulary.token_text(token_id)


def _item(medium: Medium, offset: int, *others: int) -> PreparedItem:
    """`offset`, `others`: where each of its placeholders begins."""
    return PreparedItem(
        medium.mm_hash,
        offset,
        medium.geometry.num_rows,
        medium.geometry.grid_thw,
        medium.data,
        medium.clip,
        (offset, *others) if others else (),
        medium.second_per_grid,
        medium.bounds,
        medium.pixels_nbytes,
    )


def _weight(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
    """About so many characters are to be rendered; no more than `INLINE_CHARS` are counted."""
    weight = PART_CHARS * (len(messages) + 8 * len(tools))
    for message in messages:
        if weight > INLINE_CHARS:
            break
        content = message["content"]
        weight += len(content)
        if not isinstance(content, str):
            weight += sum(PART_CHARS + len(part.get("text", "")) for part in content)
    return weight


def _media_parts(messages: Sequence[ChatMessage]) -> Iterator[_Part]:
    """Every image and video, in order."""
    return (
        _media_part(part, f"messages[{i}].content[{j}]")
        for i, message in enumerate(messages)
        if not isinstance(message["content"], str)
        for j, part in enumerate(message["content"])
        if part["type"] != "text"
    )


def _media_part(part: MessagePart, name: str) -> _Part:
    if part["type"] == "image_url":
        return _Part((part["image_url"]["url"],), f"{name}.image_url", bounds=part.get("bounds"))
    return _Part(
        tuple(part["urls"]),
        f"{name}.{part['field']}",
        is_image=False,
        is_file=part["is_file"],
        sampling=part["sampling"],
    )
