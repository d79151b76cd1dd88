"""The model's own tokenizer, from `tokenizer.json`, as transformers would set it up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from epd.frontend import JsonObject
from epd.model_files.checkpoint import ModelError, is_there, read_bytes, read_optional

_SPECIAL_TOKENS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(directory: Path, tokenizer_config: Mapping[str, object]) -> Tokenizer:
    """Raises ModelError.

    Some files carry the truncation and padding of their training, which would cut prompts without a
    word; some keep added tokens in tokenizer_config.json only.
    """
    path = directory / "tokenizer.json"
    if not is_there(path):
        raise ModelError(
            f"{directory} has no tokenizer.json; save the model's fast tokenizer there"
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(read_bytes(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")
    except (KeyboardInterrupt, SystemExit, ModelError):
        raise
    except BaseException as error:  # tokenizers raises plain Exception, and its panics are neither
        raise ModelError(f"{path} cannot be read ({error}); restore the file") from error
    path = directory / "tokenizer_config.json"
    added = _members(tokenizer_config.get("added_tokens_decoder"))
    for _, token in sorted(added.items(), key=lambda entry: entry[0].zfill(20)):
        said = _members(token)
        if tokenizer.token_to_id(content := _content(path, said)) is None:
            flags = {name: bool(said[name]) for name in _ADDED_TOKEN_FLAGS if name in said}
            tokenizer.add_tokens([AddedToken(content, **flags)])
    return tokenizer


def _content(path: Path, token: JsonObject) -> str:
    """The text of a token, as the files describe it.  Raises ModelError."""
    content = token.get("content")
    if not isinstance(content, str):
        raise ModelError(f"{path}: a token has no content; restore the file")
    return content


def _members(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def special_tokens(directory: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Texts of the tokens that templates call by name: `bos_token` and the like, and own ones."""
    path = directory / "special_tokens_map.json"
    older = read_optional(path)
    found = {name: tokenizer_config.get(name, older.get(name)) for name in _SPECIAL_TOKENS}
    own = tokenizer_config.get("extra_special_tokens")
    if isinstance(own, dict):
        found |= own
    return {
        name: _content(path, token) if isinstance(token, dict) else str(token)
        for name, token in found.items()
        if token is not None
    }
