"""One public schema against its instances, as a request with it would be answered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.api.http.errors import ApiError
from tests.answers import GRAMMARS, grammar_of, takes
from tests.hostile.forked import forked

DATA = Path(__file__).parent / "data"


@dataclass
class Share:
    """Of a collection under one reading of `additionalProperties`."""

    schemas: int = 0
    refused: int = 0
    passed: int = 0  # each instance was judged rightly
    valid: int = 0
    valid_taken: int = 0
    invalid: int = 0
    invalid_taken: int = 0

    def __str__(self) -> str:
        return (
            f"{self.passed} of {self.schemas} schemas pass ({self.passed / self.schemas:.1%}), "
            f"{self.refused} refused; valid instances accepted {self.valid_taken} of {self.valid}; "
            f"invalid ones accepted {self.invalid_taken} of {self.invalid}"
        )


def paths(directories: Iterable[Path]) -> list[Path]:
    return sorted(path for directory in directories for path in directory.rglob("*.json"))


def judged(path: Path, closes: bool) -> str:
    """JSON: why it was refused, or whether each instance is accepted."""
    schema, tests = (json.loads(path.read_text("utf-8"))[key] for key in ("schema", "tests"))
    try:
        grammar = grammar_of(schema, closes=closes)
    except ApiError as error:
        return json.dumps(error.message)
    if reason := GRAMMARS.proof(grammar):
        return json.dumps(reason)
    matcher = GRAMMARS._matcher(grammar)
    texts = (json.dumps(test["data"], ensure_ascii=False) for test in tests)
    return json.dumps([takes(matcher.deep_copy(), text) for text in texts])


def share(files: Iterable[Path], *, closes: bool) -> tuple[Share, Counter[str], list[str]]:
    """Also why schemas were refused, and which instances were judged wrongly."""
    found, reasons, wrong = Share(), Counter[str](), list[str]()
    for path in files:
        tests = json.loads(path.read_text("utf-8"))["tests"]
        told = forked(lambda path=path: judged(path, closes))
        taken: Any = told if told.startswith("wrong") else json.loads(told)
        if isinstance(taken, str):
            reasons[taken.rpartition("cannot be followed: ")[2]] += 1
            taken = [False] * len(tests)
            found.refused += 1
        elif all(one == test["valid"] for one, test in zip(taken, tests, strict=True)):
            found.passed += 1
        found.schemas += 1
        for at, (is_taken, test) in enumerate(zip(taken, tests, strict=True)):
            is_valid = test["valid"]
            found.valid += is_valid
            found.valid_taken += is_valid and is_taken
            found.invalid += not is_valid
            found.invalid_taken += is_taken and not is_valid
            if is_taken != is_valid:
                wrong.append(f"{path.name} #{at} ({'valid' if is_valid else 'invalid'})")
    return found, reasons, wrong
