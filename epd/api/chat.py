"""Messages to token ids, as transformers does it, without transformers.

The model's own chat template makes the text, its own `tokenizer.json` the ids; then each image
placeholder becomes as many as the picture has rows.  The number of placeholders must be the number
of pictures: text that spells a placeholder out is refused, not believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epd.api.chat_template import ChatTemplate, find_template
from epd.api.errors import bad_request
from epd.api.tokenizer import load_tokenizer, special_tokens
from epd.engine.checkpoint import read_config, read_json


class ChatRenderer:
    """Template and tokenizer of one model directory.  Raises ModelError when made."""

    def __init__(self, model_dir: Path | str) -> None:
        directory = Path(model_dir)
        self.config = read_config(directory)
        path = directory / "tokenizer_config.json"
        settings = read_json(path) if path.is_file() else {}
        self.tokenizer = load_tokenizer(directory, settings)
        self.image_token_id: int | None = self.config.get(
            "image_token_id", self.config.get("image_token_index")
        )
        source = find_template(directory, settings)
        self._template = (
            ChatTemplate(source, special_tokens(directory, settings)) if source else None
        )

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The prompt's text, with one placeholder per picture.  Raises ApiError 400."""
        if self._template is None:
            raise bad_request(
                "this model has no chat template; use /v1/completions, or add chat_template.jinja "
                "to its directory",
                "messages",
            )
        return self._template.render(messages, tools)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; text that spells a special token becomes it, as in transformers."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def expand(
        self, ids: Sequence[int], row_counts: Sequence[int], param: str = "messages"
    ) -> tuple[list[int], list[int]]:
        """Ids with each placeholder repeated for its rows, and the offsets of the first ones.

        `row_counts`: rows of each picture, in order.  Raises ApiError 400 naming `param`.
        """
        token = self.image_token_id
        found = ids.count(token) if token is not None else 0
        if found != len(row_counts):
            raise bad_request(
                f"the prompt has {found} image placeholders for {len(row_counts)} pictures; "
                "text must not contain the model's image placeholder",
                param,
            )
        expanded: list[int] = []
        offsets: list[int] = []
        end = 0
        for num_rows in row_counts:
            assert token is not None
            at = ids.index(token, end)
            expanded += ids[end:at]
            offsets.append(len(expanded))
            expanded += [token] * num_rows
            end = at + 1
        expanded += ids[end:]
        return expanded, offsets
