"""The first fault of a JSON value, found by a walk of the value beside its type.

The complaints of `msgspec` are sentences; its types are data (`msgspec.inspect`).  So is a fault
here: a place, a rule, a bound.  The walk also does what types of Python leave open and JSON does
not: null is absence, and 5.0 is an integer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

from msgspec import inspect

from epd.api.http.errors import ApiError, bad_request

SEE = "GET /openapi.json has what is taken"
_NAME_CHARS, _KEY_CHARS = 120, 64  # of a name that a client made, in a message
_DIGITS = re.compile(r"[0-9]{1,11}")
# What JSON has, in its words; the words of what is expected; and the types that take it.
_KINDS: tuple[tuple[type, str, str, tuple[type[inspect.Type], ...]], ...] = (
    (bool, "a boolean", "true or false", (inspect.BoolType,)),
    (int, "a number", "an integer", (inspect.IntType,)),
    (int, "a number", "a number", (inspect.FloatType,)),
    (float, "a number", "a number", (inspect.FloatType,)),
    (str, "a string", "a string", (inspect.StrType, inspect.LiteralType)),
    (list, "an array", "an array", (inspect.ListType, inspect.VarTupleType)),
    (dict, "an object", "an object", (inspect.DictType, inspect.StructType)),
    (NoneType, "null", "null", (inspect.NoneType,)),
)
Number = inspect.IntType | inspect.FloatType
Array = inspect.ListType | inspect.VarTupleType
Extra = Mapping[str, Any]  # beside a type: `code` and `missing`, codes instead of the rules'


class Codes(NamedTuple):
    """Codes of rules, which differ by API."""

    missing: str | None = None
    empty: str | None = "out_of_range"
    choice: str | None = "unsupported_parameter"


CODES = Codes()


def expected(path: str, what: str, value: object) -> ApiError:
    got = next(word for kind, word, *_ in _KINDS if isinstance(value, kind))
    return bad_request(f"{path} must be {what}, not {got}", path, "invalid_type")


def missing(path: str, code: str | None) -> ApiError:
    return bad_request(f"{path} is missing", path, code)


def out_of_range(path: str, allowed: str, value: float) -> ApiError:
    shown = str(value) if abs(value) < 10**18 else "a number of many digits"
    return bad_request(f"{path} must be {allowed}, not {shown}", path, "out_of_range")


def checked(value: Mapping[str, object], kind: inspect.Type, codes: Codes) -> object:
    """The same value without nulls in objects, and with 5.0 as 5 where an integer is due.  Raises
    ApiError 400 for the first fault."""
    return _Walk(codes).read(value, kind, "")


class _Walk:
    def __init__(self, codes: Codes) -> None:
        self._codes = codes

    def read(self, value: Any, kind: inspect.Type, path: str, extra: Extra = {}) -> object:  # noqa: B006
        if isinstance(kind, inspect.Metadata):
            return self.read(value, kind.type, path, kind.extra or {})
        if isinstance(kind, inspect.AnyType):
            return value
        if isinstance(kind, inspect.UnionType):
            return self._union(value, kind, path, extra)
        if not _fits(value, kind):
            raise expected(path, _word(kind), value)
        if isinstance(kind, inspect.StructType):
            return self._object(value, kind, path)
        if isinstance(kind, inspect.DictType):
            return self._map(value, kind, path)
        if isinstance(kind, inspect.ListType | inspect.VarTupleType):
            self._check_length(value, kind, path, extra)
            items = enumerate(value)
            return [self.read(item, kind.item_type, f"{path}[{i}]") for i, item in items]
        if isinstance(kind, inspect.StrType):
            self._check_text(value, kind, path, extra)
        elif isinstance(kind, inspect.LiteralType):
            self._check_choice(value, kind.values, path, extra.get("code", self._codes.choice))
        elif isinstance(kind, inspect.IntType):
            value = int(value)
            _check_bounds(value, kind, path)
        elif isinstance(kind, inspect.FloatType):
            _check_bounds(value, kind, path)
        return value

    def _union(self, value: Any, kind: inspect.UnionType, path: str, extra: Extra) -> object:
        fitting = [one for one in kind.types if _fits(value, one)]
        if not fitting:
            words = dict.fromkeys(map(_word, kind.types))
            raise expected(path, " or ".join(word for word in words if word != "null"), value)
        if len(fitting) == 1:
            return self.read(value, fitting[0], path, extra)
        by_tag = {one.tag: one for one in fitting if isinstance(one, inspect.StructType)}
        field = next(iter(by_tag.values())).tag_field
        place = f"{path}.{field}"
        if field not in value:
            raise missing(place, self._codes.missing)
        tag = value[field]
        self._check_choice(tag, [*by_tag], place, extra.get("code", "unsupported_parameter"))
        return self._object(value, by_tag[tag], path)

    def _object(self, value: Any, kind: inspect.StructType, path: str) -> object:
        fields = {field.encode_name: field for field in kind.fields}
        read: dict[str, object] = {}
        for name, item in value.items():
            place = f"{path}.{name}" if path else name
            if item is None:
                continue
            if name in fields:
                read[name] = self.read(item, fields[name].type, place)
            elif name == kind.tag_field:
                self._check_choice(item, [kind.tag], place, "unsupported_parameter")
                read[name] = item
            elif not path or item != []:  # answers have such, and come back as they were
                raise _unknown(place, is_top=not path)
        for name, field in fields.items():
            if field.required and name not in read:
                if name in value:
                    self.read(None, field.type, f"{path}.{name}")  # which is no null
                extra: Extra = getattr(field.type, "extra", None) or {}
                code = extra.get("missing", self._codes.missing)
                raise missing(f"{path}.{name}" if path else name, code)
        return read

    def _map(self, value: Any, kind: inspect.DictType, path: str) -> object:
        """An object of any names; where these are integers, `007` is 7."""
        key_type, read = _bare(kind.key_type), {}
        for key, item in value.items():
            if isinstance(key_type, inspect.IntType):
                if not _DIGITS.fullmatch(key) or _breach(int(key), key_type):
                    allowed = _allowed(key_type)
                    message = f"{path} has the key '{key[:40]}'; keys are integers, {allowed}"
                    raise bad_request(message, path, "out_of_range")
                key = str(int(key))
            read[key] = self.read(item, kind.value_type, f"{path}.{key[:_KEY_CHARS]}")
        return read

    def _check_length(self, value: Sequence[object], kind: Array, path: str, extra: Extra) -> None:
        if kind.min_length is not None and len(value) < kind.min_length:
            code = extra.get("code", self._codes.empty)
            raise bad_request(f"{path} must not be empty", path, code)
        if kind.max_length is not None and len(value) > kind.max_length:
            message = f"{path} has {len(value)} items; at most {kind.max_length} are taken"
            raise bad_request(message, path, extra.get("code", "out_of_range"))

    def _check_text(self, value: str, kind: inspect.StrType, path: str, extra: Extra) -> None:
        low, high = kind.min_length or 0, kind.max_length
        if not low <= len(value) <= (len(value) if high is None else high):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            message = f"{path} must have {allowed} characters, not {len(value)}"
        elif kind.pattern is not None and not re.search(kind.pattern, value):
            message = f"{path} must match the pattern {kind.pattern}"
        else:
            return
        raise bad_request(message, path, extra.get("code", "out_of_range"))

    def _check_choice(
        self, value: object, values: Sequence[object], path: str, code: str | None
    ) -> None:
        if not isinstance(value, str):
            raise expected(path, "a string", value)
        if value not in values:
            allowed = ", ".join(map(str, values))
            raise bad_request(f"{path} must be one of {allowed}, not '{value[:40]}'", path, code)


def _unknown(path: str, *, is_top: bool) -> ApiError:
    path = path[:_NAME_CHARS]
    if is_top:
        message = f"unknown parameter '{path}'; remove it ({SEE})"
        return bad_request(message, path, "unknown_parameter")
    return bad_request(f"{path} is not supported; remove it ({SEE})", path, "unsupported_parameter")


def _check_bounds(value: float, kind: Number, path: str) -> None:
    if _breach(value, kind):
        raise out_of_range(path, _allowed(kind), value)


def _breach(value: float, kind: Number) -> bool:
    is_low = (kind.ge is not None and value < kind.ge) or (kind.gt is not None and value <= kind.gt)
    return is_low or (kind.le is not None and value > kind.le)


def _allowed(kind: Number) -> str:
    """In words, the bounds of a number, which has a lower one."""
    low, high = (f"{end}".removesuffix(".0") for end in (kind.gt or kind.ge or 0, kind.le))
    if kind.gt is not None:
        return f"above {low} and at most {high}"
    return f"at least {low}" if kind.le is None else f"{low} to {high}"


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _word(kind: inspect.Type) -> str:
    return next(word for _, _, word, kinds in _KINDS if isinstance(_bare(kind), kinds))


def _fits(value: object, kind: inspect.Type) -> bool:
    """Whether JSON has one word for the kind of both."""
    kind = _bare(kind)
    if isinstance(value, float) and value.is_integer() and isinstance(kind, inspect.IntType):
        return True
    takes = [kinds for one, _, _, kinds in _KINDS if isinstance(value, one)]
    takes = takes[:1] if isinstance(value, bool) else takes  # which is an integer to Python
    return isinstance(kind, (inspect.AnyType, *(one for kinds in takes for one in kinds)))
