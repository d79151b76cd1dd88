"""Readers of single JSON fields: each takes a decoded value and its name, and checks it.

Every complaint names the field and says what it may be, in the one place where both are known.
Raises ApiError 400 with `param` set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from epd.api.http.errors import ApiError, bad_request
from epd.frontend import JsonObject

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128


def kind(value: object) -> str:
    """JSON's word for a value."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "an array"
    return "null" if value is None else "an object"


def expected(name: str, what: str, value: object) -> ApiError:
    return bad_request(f"{name} must be {what}, not {kind(value)}", name, "invalid_type")


def shown(value: float) -> str:
    """A number in a message; JSON allows integers of any length."""
    return str(value) if abs(value) < 10**18 else "a number of many digits"


def integer(value: object, name: str, low: int, high: int | None = None) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number: 5.0 is an integer
    if isinstance(value, bool) or not isinstance(value, int):
        raise expected(name, "an integer", value)
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise bad_request(f"{name} must be {allowed}, not {shown(value)}", name, "out_of_range")
    return value


def number(
    value: object, name: str, low: float, high: float, *, low_excluded: bool = False
) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise expected(name, "a number", value)
    if not (low <= value <= high) or (low_excluded and value == low) or not math.isfinite(value):
        allowed = f"above {low:g} and at most {high:g}" if low_excluded else f"{low:g} to {high:g}"
        raise bad_request(f"{name} must be {allowed}, not {shown(value)}", name, "out_of_range")
    return float(value)


def boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise expected(name, "true or false", value)
    return value


def string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise expected(name, "a string", value)
    return value


def json_text(value: object, name: str) -> object:
    """What a string means that is JSON itself.  As strict as the body around it: no NaN, no number
    out of range, no lone surrogate (F73)."""
    text = string(value, name)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        reason = str(error)
    except RecursionError:
        reason = "nested too deeply"
    raise bad_request(f"{name} is not JSON: {reason}", name, "invalid_json")


def one_of(value: object, name: str, values: Sequence[str]) -> str:
    text = string(value, name)
    if text not in values:
        message = f"{name} must be one of {', '.join(values)}, not '{text[:40]}'"
        raise bad_request(message, name, "out_of_range")
    return text


def array(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise expected(name, "an array", value)
    if not value:
        raise bad_request(f"{name} must not be empty", name)
    return value


def mapping(value: object, name: str) -> JsonObject:
    if not isinstance(value, dict):
        raise expected(name, "an object", value)
    return value


def only(value: Mapping[str, object], name: str, keys: Sequence[str]) -> None:
    """Refuse, by name, what is set besides `keys`."""
    for key, field in value.items():
        if key not in keys and field is not None:
            path = f"{name}.{key}"
            raise bad_request(f"{path} is not supported", path, "unsupported_parameter")


def logit_bias(value: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """`{"<token id>": bias}`, sorted by id."""
    biases, name = {}, "logit_bias"
    for key, bias in mapping(value, name).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            message = f"{name} has the key '{key[:40]}'; keys are token ids, 0 to {vocab_size - 1}"
            raise bad_request(message, name, "out_of_range")
        biases[int(key)] = number(bias, f"{name}.{key}", -100, 100)
    return tuple(sorted(biases.items()))


def token_ids(value: object, name: str, vocab_size: int, most: int = MAX_STOPS) -> tuple[int, ...]:
    """An array of ids, which may be empty."""
    if not isinstance(value, list):
        raise expected(name, "an array of token ids", value)
    if len(value) > most:
        message = f"{name} holds {len(value)} ids; at most {most} are taken"
        raise bad_request(message, name, "out_of_range")
    return tuple(integer(v, f"{name}[{i}]", 0, vocab_size - 1) for i, v in enumerate(value))
