"""From a validated request to a prompt: pictures measured, template rendered, ids expanded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.api.chat import ChatRenderer
from epd.api.detokenize import Detokenizer, Vocabulary
from epd.api.errors import bad_request
from epd.api.identity import mm_hash, scope_of
from epd.api.media import MediaFetcher, is_data_url, read_data_url
from epd.api.picture import load_pillow, read_size
from epd.api.port import PreparedItem
from epd.api.structured import Constraint
from epd.api.tools import ToolUse
from epd.config import GatewayConfig
from epd.engine.base import MediaError
from epd.engine.checkpoint import read_eos_token_ids, read_json, read_preprocessor
from epd.engine.fingerprint import model_fingerprint, processor_fingerprint

if TYPE_CHECKING:
    from epd.engine.grammar import Grammars
from epd.engine.geometry import Geometry, image_geometry

NUM_THREADS = 2
INLINE_CHARS = 2048  # shorter text is tokenized on the loop: cheaper than a trip to a thread
INLINE_NBYTES = 64 << 10  # likewise for base64, hashing and reading a header


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids with placeholders expanded to rows, and the pictures behind them."""

    token_ids: tuple[int, ...]
    items: tuple[PreparedItem, ...]


@dataclass(frozen=True, slots=True)
class _Picture:
    data: bytes
    mm_hash: str
    geometry: Geometry


class Preparer:
    """Everything that the gateway knows of its model; free of torch."""

    def __init__(self, config: GatewayConfig) -> None:
        directory = Path(config.model_dir)
        self._config = config
        self._renderer = ChatRenderer(directory)
        self._preprocessor = read_preprocessor(directory)
        self._fingerprint = model_fingerprint(directory)
        self._processor = processor_fingerprint(directory)
        self._fetcher = MediaFetcher(config.limits)
        self._vocabulary = Vocabulary(self._renderer.tokenizer)
        self._grammars: Grammars | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="epd-prepare")
        model = self._renderer.config
        text = model.get("text_config", model)
        self.model_name = config.model_name or directory.resolve().name
        self.max_context = int(text.get("max_position_embeddings", 4096))
        self.vocab_size = int(text.get("vocab_size", self._renderer.tokenizer.get_vocab_size()))
        self.takes_images = self._renderer.image_token_id is not None
        if self.takes_images:
            load_pillow()  # now, not in the first request
        path = directory / "generation_config.json"
        generation = read_json(path) if path.is_file() else {}
        self.eos_token_ids = read_eos_token_ids(directory)
        self.defaults: Mapping[str, Any] = _sampling_defaults(generation)

    async def close(self) -> None:
        await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- prompts ----------------------------------------------------------------------------------

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        tenant: str = "",
    ) -> Prompt:
        """The prompt of a conversation.  Raises ApiError.

        `tools`: those that may be called.  `tenant`: see `identity.tenant_of`.
        """
        urls = _image_urls(messages)
        limit = self._config.limits.max_images
        if urls and not self.takes_images:
            raise bad_request("this model takes no pictures; send text only", urls[0][1])
        if len(urls) > limit:
            raise bad_request(
                f"the request has {len(urls)} pictures; at most {limit} are taken", urls[limit][1]
            )
        scope = scope_of(self._config.cache_scope, self._config.tenant, tenant)
        pictures = await asyncio.gather(*(self._picture(url, param, scope) for url, param in urls))
        text = self._renderer.render(messages, tools)
        ids = await self._encode(text, "messages", add_special_tokens=False)
        counts = [picture.geometry.num_rows for picture in pictures]
        expanded, offsets = self._renderer.expand(ids, counts)
        items = tuple(
            PreparedItem(p.mm_hash, offset, p.geometry.num_rows, p.geometry.grid_thw, p.data)
            for p, offset in zip(pictures, offsets, strict=True)
        )
        return Prompt(tuple(expanded), items)

    async def completion(self, prompt: str | Sequence[int]) -> Prompt:
        """The prompt of a plain completion.  Raises ApiError."""
        if isinstance(prompt, str):
            ids: Sequence[int] = await self._encode(prompt, "prompt", add_special_tokens=True)
        else:
            ids = prompt
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise bad_request(
                f"prompt holds token id {bad}; ids are 0 to {self.vocab_size - 1}", "prompt"
            )
        if not ids:
            raise bad_request("prompt is empty; send at least one token", "prompt")
        expanded, _ = self._renderer.expand(ids, (), "prompt")
        return Prompt(tuple(expanded), ())

    async def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self.max_context:
            self._check_length(text, param)
        if len(text) <= INLINE_CHARS:
            return self._renderer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads,
            lambda: self._renderer.encode(text, add_special_tokens=add_special_tokens),
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

    async def _picture(self, url: str, param: str, scope: str) -> _Picture:
        """Decode base64, read the header, hash: at once if it is short, on a thread if not."""
        source = url if is_data_url(url) else await self._fetcher.fetch(url, param)
        if len(source) <= INLINE_NBYTES:
            return self._measure(source, param, scope)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._measure, source, param, scope)

    def _measure(self, source: str | bytes, param: str, scope: str) -> _Picture:
        """Of a data: URL or of the bytes."""
        limits = self._config.limits
        data = read_data_url(source, limits, param) if isinstance(source, str) else source
        width, height = read_size(data, limits, param)
        try:
            geometry = image_geometry(self._renderer.config, self._preprocessor, width, height)
        except MediaError as error:
            raise bad_request(f"{param}: {error}", param) from None
        key = mm_hash(scope, data, self._processor, self._fingerprint)
        return _Picture(data, key, geometry)

    async def grammar(self, constraint: Constraint | ToolUse) -> str:
        """The text that constrains the answer.  Raises ApiError 400."""
        if self._grammars is None:  # seldom asked for, and a large vocabulary takes its time
            from epd.engine.grammar import Grammars

            self._grammars = Grammars(self._config.model_dir, self.vocab_size)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, constraint.checked_grammar, self._grammars.fault
        )

    # --- text -------------------------------------------------------------------------------------

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return self._vocabulary.detokenizer(skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, as log-probabilities show it: text (may be broken) and its bytes."""
        return self._vocabulary.token_text(token_id)


def _image_urls(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """`(url, parameter name)` of every picture, in order."""
    return [
        (part["image_url"]["url"], f"messages[{i}].content[{j}].image_url")
        for i, message in enumerate(messages)
        if not isinstance(message["content"], str)
        for j, part in enumerate(message["content"])
        if part["type"] == "image_url"
    ]


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """What its publisher wants where a request says nothing; fields of `validation.Asked`.

    A model that is not meant to be sampled answers greedily, as under generate.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    if generation.get("max_new_tokens") is not None:
        found["default_max_tokens"] = generation["max_new_tokens"]
    return found
