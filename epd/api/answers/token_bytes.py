"""The bytes of one token, which its text may lack: a token may be a part of a character.

Log-probabilities have them, so that a client can put characters together and distinguish two broken
tokens.  Byte-level vocabularies (Qwen, Llama 3) spell each byte as a printable character, in the
alphabet of GPT-2; vocabularies with byte fallback (Llama 2) have pieces such as `<0xE4>`.
"""

from __future__ import annotations

import json
import re
from functools import cache

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id, of a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._is_byte_level = '"ByteLevel"' in json.dumps(
            json.loads(tokenizer.to_str()).get("decoder")
        )

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that the vocabulary does not use."""
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return _spelled(piece)
        if token_id not in self._added and (found := _FALLBACK.fullmatch(piece)):
            return bytes.fromhex(found[1])
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _spelled(piece: str) -> bytes:
    """From GPT-2's alphabet; a piece that is not in it, an added token, stands for itself."""
    alphabet = _alphabet()
    if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return piece.encode()


@cache
def _alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 is itself, the rest follows from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
