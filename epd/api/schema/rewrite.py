"""JSON schemas as clients send them, rewritten so that llguidance follows them exactly.

Whatever is rewritten here admits the same answers or fewer: an answer under the new schema is valid
under the old one.  What cannot be kept exactly is refused.

- Annotations are dropped: they bind no answer, and do not count towards the length of a schema.  A
  `format` that is unknown is one of them, as the standard has it.
- A literal number is an integer up to 2^53, or a fraction that llguidance reads as itself
  (`_is_kept`), not as a neighbour.  Bounds move inwards.  Multiples have one: past the digits that
  a number may have (`engine.finite`) nothing could make it a multiple; and there are few remainders
  (`_check_multiples`), of which a mask may have to search all.
- Spaces of a pattern are those that are spaces to ECMA 262 and to Rust.
- `date`, `time` and `date-time` admit what a calendar and a clock have; names of hosts and mail
  have their lengths.
- `oneOf` whose branches exclude each other is `anyOf`, which needs no negation.
- What no finite value satisfies is `false`, as is `not` of anything; `propertyNames` are patterns.
- An object that lists `properties` and is silent about others has no others, as in OpenAI's strict
  mode and in xgrammar.  The standard's own reading admits any (`closes=False`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import TypeGuard

from epd.api.schema.branches import exclude, required
from epd.api.schema.ends import Ends
from epd.api.schema.names import name_members
from epd.api.schema.references import NAMED
from epd.frontend import JsonObject

_ANNOTATIONS = frozenset(
    "$comment contentEncoding contentMediaType contentSchema default deprecated description "
    "example examples readOnly title writeOnly x-guidance".split()
)
_FORMATS = frozenset("duration email hostname ipv4 ipv6 uri uuid".split())  # of llguidance
_COUNTS = frozenset(
    "maxContains maxItems maxLength maxProperties minContains minItems minLength "
    "minProperties".split()
)
MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = (
    *("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"),
    *("then", "unevaluatedItems", "unevaluatedProperties"),
)
_JOINED = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref")
_ABOUT_MEMBERS = frozenset((*_JOINED, "additionalProperties", "patternProperties", "properties"))
_ABOUT_OTHERS = ("additionalProperties", "unevaluatedProperties")

MAX_INTEGER = 2**63 - 1024  # the largest float below 2^63
MAX_EXACT = 2**53  # every integer up to here is a float
MAX_NUMBER = 1e15
MAX_DIGITS = 15  # of a decimal text that survives being a float
MAX_POWER = 308  # of ten, in the table by which llguidance reads
MAX_REMAINDERS = 2000  # they took half of the fuel of a mask; 4000 all of it

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_SPACES = (
    r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"  # ECMA 262
)
_CLASSES = {r"\s": f"[{_SPACES}]", r"\S": rf"[^{_SPACES}\x{{85}}\x{{feff}}]"}
_MAIL = r"^[^@]{1,64}@[^.]{1,63}(?:\.[^.]{1,63})*$"  # RFC 5321
_MOST_CHARS = {"email": 254, "hostname": 253}
_CALENDAR = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$"}


class NotExact(ValueError):
    """The text names the place and the reason."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a schema stands, and what that means for it."""

    names: tuple[str, ...] = ()
    is_joined: bool = False  # others speak of the same object
    narrows: bool = True  # fewer answers here are fewer of the whole; not so below `not`

    @property
    def reference(self) -> str:
        escaped = (name.replace("~", "~0").replace("/", "~1") for name in self.names)
        return "/".join(("#", *escaped))

    def __str__(self) -> str:
        return ".".join(self.names)

    def below(self, *names: str, is_joined: bool, narrows: bool = True) -> _Place:
        return _Place((*self.names, *names), is_joined, self.narrows and narrows)


def exact(schema: object, *, closes: bool = True) -> object:
    """The schema that is compiled.  Raises NotExact, RecursionError."""
    joined: set[str] = set()  # references to objects of which others speak, too
    narrows, known = True, -1
    while known < len(joined):  # what such an object refers to is one, too
        known = len(joined)
        narrows = _note_references(schema, _Place(), joined)
    places = {place.reference: one for place, one in _all(schema, _Place(), joined)}
    _check_multiples([one for one in places.values() if isinstance(one, dict)])
    ends = Ends(places)
    if not ends(schema):
        raise NotExact("nothing finite satisfies it")
    return _rewritten(schema, _Place(narrows=narrows), joined, closes, ends)


def _all(schema: object, place: _Place, joined: set[str]) -> Iterator[tuple[_Place, object]]:
    yield place, schema
    if isinstance(schema, dict):
        for there, child in _children(schema, place, joined):
            yield from _all(child, there, joined)


def _note_references(schema: object, place: _Place, joined: set[str]) -> bool:
    """False: something refers to a definition from where it cannot be narrowed."""
    if not isinstance(schema, dict):
        return True
    narrows = True
    if isinstance(reference := schema.get("$ref"), str):
        narrows = place.narrows
        if _is_inside(schema, place, joined):
            joined.add(reference)
    for there, child in _children(schema, place, joined):
        narrows &= _note_references(child, there, joined)
    return narrows


def _children(
    schema: JsonObject, place: _Place, joined: set[str]
) -> Iterator[tuple[_Place, object]]:
    inside = _is_inside(schema, place, joined)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            joins = inside and key == "dependentSchemas"
            for name, one in value.items():
                yield place.below(key, name, is_joined=joins), one
        elif key in MANY and isinstance(value, list):
            joins = key != "prefixItems" and (inside or (key == "allOf" and len(value) > 1))
            narrows = key != "oneOf" or exclude(value)
            for n, one in enumerate(value):
                yield place.below(key, str(n), is_joined=joins, narrows=narrows), one
        elif key in _ONE:
            narrows = key not in ("not", "if", "contains")
            yield place.below(key, is_joined=inside and key in _JOINED, narrows=narrows), value


def _is_inside(schema: JsonObject, place: _Place, joined: set[str]) -> bool:
    return place.is_joined or place.reference in joined or _speaks_with_others(schema)


def _rewritten(schema: object, place: _Place, joined: set[str], closes: bool, ends: Ends) -> object:
    if not isinstance(schema, dict):
        return schema
    if not ends(schema):
        return False
    found: JsonObject = {}
    named: dict[str, JsonObject] = {}
    lists: dict[str, list[object]] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = named[key] = {}
        elif key in MANY and isinstance(value, list):
            found[key] = lists[key] = []
        elif key not in _ANNOTATIONS:
            found[key] = _keyword(key, value, place)
    for there, child in _children(schema, place, joined):
        new = _rewritten(child, there, joined, closes, ends)
        key = there.names[len(place.names)]
        if key in lists:
            lists[key].append(new)
        elif key in named:
            named[key][there.names[-1]] = new
        else:
            found[key] = new
    if found.get("not") is False:
        del found["not"]
    if not _is_inside(schema, place, joined):
        name_members(found)
    _bound(found, place)
    _follow_formats(found, place)
    if "anyOf" not in schema and exclude(schema.get("oneOf")):
        found["anyOf"] = found.pop("oneOf")
    if closes and place.narrows and not _is_inside(schema, place, joined) and _may_close(found):
        found["additionalProperties"] = False
    _check_fewest(found, place)
    return found


def _keyword(key: str, value: object, place: _Place) -> object:
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if key in ("const", "enum"):
        _check_literal(value, f"{place}.{key}".removeprefix("."))
    if key == "pattern" and isinstance(value, str) and place.narrows:
        return re.sub(r"\\.", lambda found: _CLASSES.get(found[0], found[0]), value)
    return value


def _check_literal(value: object, place: str) -> None:
    """Raises NotExact for a number that would come back as another one."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_literal(one, place)
    elif _is_number(value) and not _is_kept(value):
        raise NotExact(f"{place}: {value} cannot be written exactly; send it as a string")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_kept(number: float) -> bool:
    """As serde_json reads it, by one rounded power of ten, and Rust writes it, shortest first."""
    if isinstance(number, int) or number.is_integer():
        return abs(number) <= MAX_EXACT
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    if not isinstance(exponent, int):
        return False  # infinity, or no number
    whole = float("".join(map(str, digits)))
    return -exponent <= MAX_POWER and whole / float(f"1e{-exponent}") == abs(number)


# --- bounds ---------------------------------------------------------------------------------------


def _bound(schema: JsonObject, place: _Place) -> None:
    """Raises NotExact."""
    kinds = schema.get("type")
    is_whole = kinds == "integer" or (isinstance(kinds, list) and "number" not in kinds)
    for key, sign in (
        ("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1),
    ):  # fmt: skip
        bound = schema.get(key)
        if _is_number(bound):
            move = _whole_inwards if is_whole else _inwards
            moved = move(bound, sign)
            if is_whole and moved == bound and key.startswith("ex") and abs(bound) > MAX_EXACT:
                moved = int(math.nextafter(bound, sign * math.inf))  # 10^16 - 1 is 10^16 to a float
            if moved is None or (moved != bound and not place.narrows):
                at = f"{place}.{key}".removeprefix(".")
                raise NotExact(f"{at}: {bound} is more than is counted exactly; choose another")
            schema[key] = moved
    if "multipleOf" in schema and place.narrows:
        for key, other, far in (
            ("minimum", "exclusiveMinimum", -MAX_EXACT), ("maximum", "exclusiveMaximum", MAX_EXACT),
        ):  # fmt: skip
            if not _is_number(schema.get(key)) and not _is_number(schema.get(other)):
                schema[key] = far
    if not is_whole and place.narrows:
        _keep_off_zero(schema, "exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1)
        _keep_off_zero(schema, "exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1)


def _check_multiples(schemas: list[JsonObject]) -> None:
    """A mask may search each remainder of what is read so far.  Raises NotExact for too many."""
    steps = (one.get("multipleOf") for one in schemas)
    numbers = (step for step in steps if _is_number(step) and 0 < step < math.inf)
    found = {Decimal(repr(step)).normalize() for step in numbers}
    places = [len(format(step, "f").partition(".")[2]) for step in found]
    if any(map(_has_several_parts, schemas)):  # multiples of each: of their least common one
        count = math.lcm(*(int(step.scaleb(max(places, default=0))) for step in found))
    else:
        count = sum(int(step.scaleb(scale)) for step, scale in zip(found, places, strict=True))
    if count > MAX_REMAINDERS:
        most = f"more than {MAX_REMAINDERS} remainders"
        raise NotExact(f"multipleOf: {max(found)} and the like have {most}; choose a smaller step")


def _has_several_parts(schema: JsonObject) -> bool:
    """Whether one number may have to be the multiple of two."""
    all_of = schema.get("allOf")
    branches = len(all_of) - 1 if isinstance(all_of, list) else 0
    return branches + sum(key in schema for key in ("multipleOf", *_JOINED)) > 1


def _whole_inwards(bound: float, sign: int) -> int | float | None:
    """The nearest bound that a float holds, not further out; None: there is none."""
    if not math.isfinite(bound) or sign * bound > MAX_INTEGER:
        return None
    if abs(bound) <= MAX_EXACT:
        return bound
    nearest = float(max(-MAX_INTEGER, min(MAX_INTEGER, bound)))
    if sign * (int(nearest) - bound) < 0:
        nearest = math.nextafter(nearest, sign * math.inf)
    return int(nearest)


def _inwards(bound: float, sign: int) -> int | float | None:
    if not math.isfinite(bound) or sign * bound > MAX_NUMBER:
        return None
    if not bound or _is_kept(bound):
        return bound
    return -sign * MAX_NUMBER if abs(bound) > MAX_NUMBER else _rounded(bound, sign)


def _rounded(bound: float, sign: int) -> float | None:
    """To the most digits, inwards, that are kept."""
    for digits in range(MAX_DIGITS, 0, -1):
        last = Decimal(1).scaleb(Decimal(bound).adjusted() - digits + 1)
        towards = ROUND_CEILING if sign > 0 else ROUND_FLOOR
        rounded = float(Decimal(bound).quantize(last, towards))
        if sign * (rounded - bound) >= 0 and _is_kept(rounded):
            return rounded
    return None


def _keep_off_zero(
    schema: JsonObject, excluding: str, including: str, others: tuple[str, ...], sign: int
) -> None:
    """llguidance 1.x admits 0 between an exclusive 0 and a bound below 1."""
    far = [abs(bound) for key in others if _is_number(bound := schema.get(key))]
    zero = schema.get(excluding)
    if _is_number(zero) and not zero and far and min(far) < 1 and including not in schema:
        del schema[excluding]
        schema[including] = sign * min(1e-9, min(far) / 1000 or 1e-9)


# --- formats --------------------------------------------------------------------------------------


def _follow_formats(schema: JsonObject, place: _Place) -> None:
    form = schema.get("format")
    pattern = _CALENDAR.get(form) if isinstance(form, str) else None
    if pattern is None:
        if not isinstance(form, str) or form not in _FORMATS:
            schema.pop("format", None)
            return
    elif "pattern" not in schema and place.narrows:
        schema["pattern"] = pattern
        del schema["format"]
    if isinstance(form, str) and form in _MOST_CHARS and place.narrows:
        given = schema.get("maxLength", _MOST_CHARS[form])
        schema["maxLength"] = min(given, _MOST_CHARS[form]) if _is_number(given) else given
        if form == "email" and schema.setdefault("pattern", _MAIL) != _MAIL:
            several = schema.setdefault("allOf", [])
            if isinstance(several, list):
                several.append({"pattern": _MAIL})


# --- objects --------------------------------------------------------------------------------------


def _may_close(schema: JsonObject) -> bool:
    """Whether it lists its members, and can be without others."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(key in schema for key in _ABOUT_OTHERS):
        return False
    fewest = schema.get("minProperties", 0)
    has_all = all(name in properties for name in required(schema))
    return has_all and isinstance(fewest, int) and fewest <= len(properties)


def _check_fewest(schema: JsonObject, place: _Place) -> None:
    """A name that is free may come twice, and is one member to a reader.  Raises NotExact."""
    fewest = schema.get("minProperties")
    has_free = "patternProperties" in schema or schema.get("additionalProperties") is not False
    if has_free and isinstance(fewest, int) and fewest > len({*required(schema)}) + 1:
        at = f"{place}.minProperties".removeprefix(".")
        raise NotExact(f"{at}: {fewest} different names cannot be kept; list them in required")


def _speaks_with_others(schema: JsonObject) -> bool:
    """Whether it and a part of it, or several parts, list members of one object."""
    parts = [one for key in _JOINED if key in schema for one in _parts(key, schema[key])]
    speaking = any(isinstance(one, str) or _is_about_members(one) for one in parts)
    lists = "properties" in schema or "patternProperties" in schema
    all_of = schema.get("allOf")
    has_several = isinstance(all_of, list) and len(all_of) > 1
    several = has_several or sum(key in schema for key in _JOINED) > 1
    return speaking and (lists or several)


def _is_about_members(schema: object) -> bool:
    return isinstance(schema, dict) and not _ABOUT_MEMBERS.isdisjoint(schema)


def _parts(key: str, value: object) -> Iterator[object]:
    """Schemas, and texts of references."""
    if isinstance(value, dict) and key == "dependentSchemas":
        value = list(value.values())
    yield from value if isinstance(value, list) else (value,)
