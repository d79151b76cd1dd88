"""Bodies that are read by their type: a struct describes what may be sent, and the document is made
from it.

A shape is a struct of `msgspec`, which reads what is right.  What it refuses goes through a walk of
the value beside the type (`epd.api.http.faults`), which names the place, the rule and the bound.

What no type expresses alone stands beside it: a bound that the model or the settings have (`most`,
put in by `bounded`), and a parameter that is not served (`refused`).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, inspect

from epd.api.http.errors import bad_request
from epd.api.http.faults import CODES, Codes, checked, expected

S = TypeVar("S", bound="Shape")
JsonValue = Any  # of a shape: what msgspec calls any JSON value; `object` it takes for a class


class NotRead(NamedTuple):
    """Why a parameter of other servers is not read here."""

    reason: str
    harmless: tuple[object, ...] = ()  # values that change nothing


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object: every field that is not declared is refused by name."""

    refused: ClassVar[Mapping[str, NotRead]] = {}


class Facts(NamedTuple):
    """Bounds that the model and the settings have."""

    token_id: int
    choices: int
    pixels: int


def most(fact: str, least: int = 0) -> Meta:
    """The bounds of an integer whose upper one is a field of `Facts`."""
    return Meta(ge=least, extra={"most": fact})


def bounded(shape: type[S], facts: Facts) -> type[S]:
    """The same shape, where bounds that are facts are numbers."""
    return cast("type[S]", _bounded_shape(shape, facts))


@cache
def _bounded_shape(shape: Any, facts: Facts) -> Any:
    hints = get_type_hints(shape, include_extras=True)
    fields = [
        (f.name, kind) if f.required else (f.name, kind, _default(f))
        for f in msgspec.structs.fields(shape)
        if (kind := _bounded(hints[f.name], facts)) is not hints[f.name]
    ]
    if not fields:
        return shape
    return msgspec.defstruct(shape.__name__, fields, bases=(shape,), kw_only=True)


def _default(field: Any) -> object:
    if field.default is msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    default: object = field.default
    return default


def _bounded(hint: Any, facts: Facts) -> Any:
    if isinstance(hint, type) and issubclass(hint, Shape):
        return _bounded_shape(hint, facts)
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        found = [m for m in metas if isinstance(m, Meta) and m.extra and "most" in m.extra]
        if found:
            (meta,) = found
            assert meta.extra is not None
            return Annotated[base, Meta(ge=meta.ge, le=getattr(facts, meta.extra["most"]))]
        inner = _bounded(base, facts)
        return hint if inner is base else Annotated[(inner, *metas)]
    args = get_args(hint)
    inner = [_bounded(arg, facts) for arg in args]
    if all(a is b for a, b in zip(args, inner, strict=True)):
        return hint
    if isinstance(hint, types.UnionType):
        return reduce(or_, inner)
    return (get_origin(hint) or hint)[tuple(inner)]


def read_shape(value: Mapping[str, object], shape: type[S], codes: Codes = CODES) -> S:
    """The value as that shape; null at its top is absence.  Raises ApiError 400."""
    present = {name: item for name, item in value.items() if item is not None}
    for name in [name for name in present if name in shape.refused]:
        refusal, item = shape.refused[name], present.pop(name)
        if not any(item == one and type(item) is type(one) for one in refusal.harmless):
            message = f"{name} is not supported: {refusal.reason}"
            raise bad_request(message, name, "unsupported_parameter")
    try:
        return msgspec.convert(present, shape, str_keys=True)
    except msgspec.ValidationError:
        whole = checked(present, _type_of(shape), codes)
        return msgspec.convert(whole, shape, str_keys=True)


@cache
def _type_of(shape: Any) -> inspect.Type:
    return inspect.type_info(shape)


def names_of(*shapes: type[Shape]) -> frozenset[str]:
    """What they read or refuse for a reason."""
    return frozenset(n for one in shapes for n in (*one.__struct_fields__, *one.refused))


def json_text(value: object, name: str) -> object:
    """What a string means that is JSON itself.  As strict as the body around it: no NaN, no number
    out of range, no lone surrogate (F73).  Raises ApiError 400."""
    if not isinstance(value, str):
        raise expected(name, "a string", value)
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        reason = str(error)
    except RecursionError:
        reason = "nested too deeply"
    raise bad_request(f"{name} is not JSON: {reason}", name, "invalid_json")
