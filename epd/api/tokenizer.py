"""The model's own tokenizer, from `tokenizer.json`, as transformers would set it up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from epd.api.port import JsonObject
from epd.engine.checkpoint import ModelError, read_json

_SPECIAL_TOKENS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(directory: Path, tokenizer_config: Mapping[str, object]) -> Tokenizer:
    """Raises ModelError.

    Some files carry the truncation and padding of their training, which would cut prompts without a
    word; some keep added tokens in tokenizer_config.json only.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json; save the model's fast tokenizer there"
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path} cannot be read ({error}); restore the file") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = _members(tokenizer_config.get("added_tokens_decoder"))
    for _, token in sorted(added.items(), key=lambda entry: int(entry[0])):
        said = _members(token)
        if tokenizer.token_to_id(content := str(said["content"])) is None:
            flags = {name: bool(said[name]) for name in _ADDED_TOKEN_FLAGS if name in said}
            tokenizer.add_tokens([AddedToken(content, **flags)])
    return tokenizer


def _members(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def special_tokens(directory: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Texts of the tokens that templates call by name: `bos_token` and the like, and own ones."""
    path = directory / "special_tokens_map.json"
    older = read_json(path) if path.is_file() else {}
    found = {name: tokenizer_config.get(name, older.get(name)) for name in _SPECIAL_TOKENS}
    own = tokenizer_config.get("extra_special_tokens")
    if isinstance(own, dict):
        found |= own
    return {
        name: str(token["content"] if isinstance(token, dict) else token)
        for name, token in found.items()
        if token is not None
    }
