"""Messages to token ids, as transformers does it, without transformers.

The model's own chat template makes the text, its own `tokenizer.json` the ids; then each image
placeholder becomes as many as the image has rows, and a video's likewise.  Text is tokenized as a
whole.  So where a model takes the time of each frame (Qwen3-VL), a video's placeholder first
becomes one per frame, with the times between them.  That of an image whose tiles have names
(Idefics3) is expanded likewise.  The number of placeholders must be the number of images, or
videos: text that spells a placeholder out is refused, not believed.  Where rows of videos have the
placeholder of images (GLM), they get it last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epd.api.asked.chat_message import ChatMessage
from epd.api.asked.template_flags import NO_FLAGS, TemplateFlags
from epd.api.asked.tools import Tool
from epd.api.http.errors import ApiError, bad_request
from epd.api.prompts.chat_template import ChatTemplate, TemplateFault, find_template
from epd.api.prompts.escaping import Escaper
from epd.api.prompts.tokenizer import load_tokenizer, special_tokens
from epd.model_files.checkpoint import (
    ModelError,
    read_config,
    read_eos_token_ids,
    read_optional,
    read_text,
)
from epd.model_files.geometry import images_of

_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_TOKENS = (*_IMAGE_TOKENS, "video_token_id", "vision_start_token_id", "vision_end_token_id")
_IMAGE: Sequence[ChatMessage] = [
    {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "?"}]}
]


class ChatRenderer:
    """Template and tokenizer of one model directory.  Raises ModelError when made."""

    def __init__(self, model_dir: Path | str, template: str = "", *, escapes: bool = False) -> None:
        """`template`: a file that is used instead of the model's own.  `escapes`: text of special
        tokens in messages becomes ordinary tokens."""
        directory = Path(model_dir)
        self.config = read_config(directory)
        settings = read_optional(directory / "tokenizer_config.json")
        self.tokenizer = load_tokenizer(directory, settings)
        images = images_of(self.config)
        ids = (self.config.get(name) for name in _IMAGE_TOKENS)
        self.image_token_id: int | None = next((i for i in ids if i is not None), None)
        place = self.tokenizer.token_to_id(images.video_place) if images else None
        self.video_token_id: int | None = self.config.get("video_token_id", place)
        self._image_token = self._token_of(self.image_token_id)
        self._video_token = self._token_of(self.video_token_id)
        self._vision_start = self._token("vision_start_token_id")
        self._vision_end = self._token("vision_end_token_id")
        source = read_text(Path(template)) if template else find_template(directory, settings)
        named = special_tokens(directory, settings)
        try:
            self._template = ChatTemplate(source, named) if source else None
        except TemplateFault as fault:
            raise ModelError(f"the chat template of {template or directory} {fault}") from fault
        self.call_form = self._template.call_form if self._template is not None else ""
        self._escaper: Escaper | None = None
        self._check_tokens(directory)
        self.end_token_ids = self._ends(directory, named.get("eos_token", ""))
        marks = {token_id for name in _TOKENS if (token_id := self.config.get(name)) is not None}
        marks.update(self.end_token_ids)
        marks |= {self.video_token_id} - {None}
        if escapes:
            self._escaper = Escaper(self.tokenizer, source or "", marks)

    def _ends(self, directory: Path, own: str) -> tuple[int, ...]:
        """The tokens that end an answer, from every source: the files, the tokenizer's end `own`,
        and what the template writes behind an answer.  Files of a fine-tune may disagree (F75).

        Another token than a special one is an end only if the template writes nothing behind it: it
        may be a mark inside of answers.  Raises ModelError.
        """
        ends = [*read_eos_token_ids(directory)]
        if (token_id := self.tokenizer.token_to_id(own)) is not None:
            ends.append(token_id)
        behind = self._template.behind_answer() if self._template is not None else ""
        added = self.tokenizer.get_added_tokens_decoder()
        found = [t.content for t in added.values() if t.content and behind.startswith(t.content)]
        mark = max(found, key=len, default="")
        for token_id, token in added.items():
            if token.content == mark and (token.special or behind.strip() == mark.strip()):
                ends.append(token_id)
        text = self.config.get("text_config") or self.config
        size = text.get("vocab_size", self.tokenizer.get_vocab_size())
        return tuple(dict.fromkeys(i for i in ends if i < size))

    def _check_tokens(self, directory: Path) -> None:
        """Raises ModelError when tokenizer or template mean other tokens than config.json: no
        image could be asked about then."""
        for name in _TOKENS:
            token_id = self.config.get(name)
            if token_id is not None and self._ids(self._token(name)) != [token_id]:
                raise ModelError(
                    f"{directory}/tokenizer.json has no token of its own with the {name} of "
                    f"config.json, {token_id}; they belong to different models: restore both from "
                    "one checkpoint"
                )
        if self.image_token_id is None or self._template is None:
            return
        try:
            text = self._template.render(_IMAGE)
        except ApiError:  # it takes text only, and says so to who sends an image
            return
        if self._ids(text).count(self.image_token_id) != 1:
            raise ModelError(
                f"the chat template of {directory} does not write one token "
                f"{self.image_token_id}, the image_token_id of config.json, for an image; they "
                "belong to different models: restore both from one checkpoint"
            )

    def _ids(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _token(self, name: str) -> str:
        """The text of a token that config.json names; empty without it."""
        return self._token_of(self.config.get(name))

    def _token_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self.tokenizer.id_to_token(token_id) or ""

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        flags: TemplateFlags = NO_FLAGS,
    ) -> str:
        """The prompt's text, one placeholder per image and video.  Raises ApiError 400."""
        if self._template is None:
            raise bad_request(
                "this model has no chat template; use /v1/completions, or add chat_template.jinja "
                "to its directory",
                "messages",
            )
        if self._escaper is not None:
            return self._escaper.render(self._template.render, messages, tools, flags)
        return self._template.render(messages, tools, flags)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        param: str = "messages",
    ) -> list[int]:
        """Token ids; text that spells a special token becomes it, as in transformers, unless
        `render` has escaped it.

        Raises ApiError 400 naming `param`, before a list is made of more ids than `max_tokens`.
        """
        tokenizer = self._escaper.tokenizer if self._escaper is not None else self.tokenizer
        # A batch, because other threads may run meanwhile; `encode` lets none.
        batch = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        _check_length(len(batch[0]), max_tokens, param)
        if self._escaper is None:
            return list(batch[0].ids)
        ids = self._escaper.spell(batch[0].ids)
        _check_length(len(ids), max_tokens, param)
        return ids

    def spread(self, text: str, videos: Sequence[Sequence[tuple[str, str]]]) -> str:
        """The prompt's text with one placeholder per frame of each video.

        `videos`: what stands before and behind each frame of each in order.  Raises ApiError 400.
        """
        place = self._vision_start + self._video_token + self._vision_end
        texts = ["".join(before + place + behind for before, behind in one) for one in videos]
        return self._with_texts(text, "video", self._video_token, texts)

    def tiled(self, text: str, tiles: Sequence[tuple[int, int]]) -> str:
        """The prompt's text with one placeholder per tile, behind its name, where the model has
        that.  `tiles`: of each image in order.  Raises ApiError 400."""
        images = images_of(self.config)
        if not (images and images.tile_text):
            return text
        texts = [images.tile_text(one, self._image_token) for one in tiles]
        return self._with_texts(text, "image", self._image_token, texts)

    def _with_texts(self, text: str, kind: str, token: str, texts: Sequence[str]) -> str:
        """Each placeholder gives way to the next of `texts`."""
        first, *pieces = text.split(token) if token else [text]
        self._check_count(kind, len(pieces), len(texts), "messages")
        return first + "".join(map("".join, zip(texts, pieces, strict=True)))

    def expand(
        self,
        ids: Sequence[int],
        images: Sequence[int],
        runs: Sequence[int] = (),
        param: str = "messages",
        *,
        as_images: bool = False,
    ) -> tuple[list[int], list[int], list[int]]:
        """Ids with each placeholder repeated for its rows, and the offsets of the first ones.

        `images`, `runs`: rows of each placeholder of images and of videos, in order.  `as_images`:
        rows of videos get the placeholder of images.  Gives the ids, and the offsets of both.
        Raises ApiError 400 naming `param`.
        """
        wanted = {"image": (self.image_token_id, images), "video": (self.video_token_id, runs)}
        found: list[tuple[int, int, list[int]]] = []  # index in ids, rows, offsets of its kind
        offsets: dict[str, list[int]] = {"image": [], "video": []}
        for kind, (token, counts) in wanted.items():
            self._check_count(kind, 0 if token is None else ids.count(token), len(counts), param)
            at = -1
            for num_rows in counts:
                at = ids.index(token, at + 1)
                found.append((at, num_rows, offsets[kind]))
        row = self.image_token_id if as_images else None
        expanded: list[int] = []
        end = 0
        for at, num_rows, places in sorted(found, key=lambda place: place[0]):
            expanded += ids[end:at]
            places.append(len(expanded))
            expanded += [ids[at] if row is None else row] * num_rows
            end = at + 1
        expanded += ids[end:]
        return expanded, offsets["image"], offsets["video"]

    def _check_count(self, kind: str, num_found: int, num_sent: int, param: str) -> None:
        if num_found != num_sent:
            what = "images" if kind == "image" else "videos"
            raise bad_request(
                f"the prompt has {num_found} {kind} placeholders for {num_sent} {what}; "
                f"text must not contain the model's {kind} placeholder",
                param,
            )


def _check_length(num_tokens: int, max_tokens: int | None, param: str) -> None:
    """Raises ApiError 400."""
    if max_tokens is not None and num_tokens > max_tokens:
        raise bad_request(
            f"the context holds {max_tokens} tokens, and this text needs {num_tokens}; shorten it",
            param,
            "context_length_exceeded",
        )
