"""Every byte-level token tells its own bytes, broken characters included."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from epd.api.answers.token_bytes import TokenBytes
from epd.tiny import CHECKPOINT


def test_byte_level_tokens_are_their_byte() -> None:
    token_bytes = TokenBytes(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))
    assert [token_bytes(i) for i in range(256)] == [bytes((i,)) for i in range(256)]
    assert token_bytes(258) == b"<|im_end|>"
    assert token_bytes(271) == b""


def test_joined_bytes_are_the_text() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    token_bytes = TokenBytes(tokenizer)
    text = "Größe 5 €\n\t猫"
    assert b"".join(map(token_bytes, tokenizer.encode(text).ids)).decode() == text


def test_byte_fallback_pieces() -> None:
    vocabulary = [("<unk>", 0.0), ("<0xE4>", 0.0), ("a", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, True))
    tokenizer.decoder = decoders.ByteFallback()
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes(1), token_bytes(2)] == [b"\xe4", b"a"]
