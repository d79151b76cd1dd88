"""What a grammar admits next, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from epd.model_files.grammar import Grammars

VOCAB_SIZE = 272  # of the bundled model


def next_tokens(
    grammars: Grammars, name: str, grammar: str, token_ids: Sequence[int]
) -> npt.NDArray[np.int64]:
    bits = grammars.allowed(name, grammar, token_ids)
    return np.flatnonzero(np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little"))
