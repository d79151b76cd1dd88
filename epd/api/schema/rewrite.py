"""JSON schemas as clients send them, rewritten so that llguidance follows them exactly.

Whatever is rewritten here admits the same answers or fewer: an answer under the new schema is valid
under the old one.  What cannot be kept exactly is refused.

- Annotations are dropped: they bind no answer, and do not count towards the length of a schema.  A
  `format` that is unknown is one of them, as the standard has it.
- A literal number is an integer up to 2^53, or a fraction that llguidance reads as itself
  (`_is_kept`), not as a neighbour.  Bounds move inwards.  Multiples have one, since past the digits
  that a number may have (`model_files.finite`) nothing could make it a multiple.  Remainders are
  few (`_check_multiples`), as a mask may have to search all.
- Patterns are those of ECMA 262 (`patterns`).
- `date`, `time` and `date-time` admit what a calendar and a clock have; names of hosts and mail
  have their lengths.
- `not`, `if`, `oneOf`, dependencies and the like become complements (`complement`), counts and
  names of members become members (`members`, `names`).
- What no finite value satisfies is `false`.
- An object that lists `properties` and is silent about others has no others, as in OpenAI's strict
  mode and in xgrammar.  The standard's own reading admits any (`closes=False`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from epd.api.schema.branches import required
from epd.api.schema.complement import MANY, ONE, Positive, conjoin, is_number
from epd.api.schema.ends import Ends
from epd.api.schema.members import JOINED, count_members, may_close, speaks_with_others
from epd.api.schema.names import name_members
from epd.api.schema.patterns import as_rust
from epd.api.schema.references import NAMED, target
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
    schema = Positive(schema)(schema)
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
    found = _rewritten(schema, _Place(narrows=narrows), joined, closes, ends)
    _check_references(places, schema, found, ends)
    return found


def _check_references(
    places: Mapping[str, object], schema: object, found: object, ends: Ends
) -> None:
    """Raises NotExact where a reference is to a member that names have forbidden."""
    for one in places.values():
        reference = one.get("$ref") if isinstance(one, dict) else None
        if not isinstance(reference, str) or target(found, reference) is not False:
            continue
        if ends(target(schema, reference)):
            raise NotExact(f"{reference}: no member has that name; refer to a definition")


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
            joins = key in JOINED and (inside or (key == "allOf" and len(value) > 1))
            narrows = key != "oneOf"
            for n, one in enumerate(value):
                yield place.below(key, str(n), is_joined=joins, narrows=narrows), one
        elif key in ONE:
            narrows = key not in ("not", "if", "contains")
            yield place.below(key, is_joined=inside and key in JOINED, narrows=narrows), value


def _is_inside(schema: JsonObject, place: _Place, joined: set[str]) -> bool:
    return place.is_joined or place.reference in joined or speaks_with_others(schema)


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
    if not _is_inside(schema, place, joined):
        name_members(found)
    _bound(found, place)
    _follow_formats(found, place)
    if closes and place.narrows and not _is_inside(schema, place, joined) and may_close(found):
        found["additionalProperties"] = False
    count_members(found)
    _check_fewest(found, place)
    return found


def _keyword(key: str, value: object, place: _Place) -> object:
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if key in ("const", "enum"):
        _check_literal(value, f"{place}.{key}".removeprefix("."))
    if key == "pattern" and isinstance(value, str) and place.narrows:
        return as_rust(value)
    return value


def _check_literal(value: object, place: str) -> None:
    """Raises NotExact for a number that would come back as another one."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_literal(one, place)
    elif is_number(value) and not _is_kept(value):
        raise NotExact(f"{place}: {value} cannot be written exactly; send it as a string")


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
        if is_number(bound):
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
            if not is_number(schema.get(key)) and not is_number(schema.get(other)):
                schema[key] = far
    if not is_whole and place.narrows:
        meets = not {*place.names}.isdisjoint((*JOINED, "$defs", "definitions")) or any(
            map(schema.get, JOINED)
        )
        low, high = ("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")
        _keep_off_whole(schema, low, high, 1, meets=meets)
        _keep_off_whole(schema, high, low, -1, meets=meets)


def _check_multiples(schemas: list[JsonObject]) -> None:
    """A mask may search each remainder of what is read so far.  Raises NotExact for too many."""
    steps = (one.get("multipleOf") for one in schemas)
    numbers = [step for step in steps if is_number(step)]
    if not all(0 < step < math.inf for step in numbers):
        raise NotExact(f"multipleOf: {min(numbers)} is no step; send one above 0")
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
    return branches + sum(key in schema for key in ("multipleOf", *JOINED)) > 1


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


def _keep_off_whole(
    schema: JsonObject, keys: tuple[str, str], others: tuple[str, str], sign: int, *, meets: bool
) -> None:
    """llguidance 1.x admits a whole bound that is excluded, beside a bound less than 1 away.

    `meets`: other parts may have bounds, too.
    """
    excluding, including = keys
    whole = schema.get(excluding)
    if not is_number(whole) or whole % 1:
        return
    gap = min(
        (sign * (far - whole) for key in others if is_number(far := schema.get(key))), default=1
    )
    if gap >= 1 and not meets:
        return
    least = 10.0 ** (Decimal(whole).adjusted() - MAX_DIGITS + 2) if whole else 0
    moved = _inwards(whole + sign * max(least, min(1e-9, gap / 1000 or 1e-9)), sign)
    del schema[excluding]
    given = schema.get(including)
    schema[including] = sign * max(sign * one for one in (moved, given) if is_number(one))


# --- formats --------------------------------------------------------------------------------------


def _follow_formats(schema: JsonObject, place: _Place) -> None:
    form = schema.get("format")
    pattern = _CALENDAR.get(form) if isinstance(form, str) else None
    if pattern is None:
        if not isinstance(form, str) or form not in _FORMATS:
            schema.pop("format", None)
            return
    elif place.narrows:
        conjoin(schema, {"pattern": pattern})
        del schema["format"]
    if isinstance(form, str) and form in _MOST_CHARS and place.narrows:
        given = schema.get("maxLength", _MOST_CHARS[form])
        schema["maxLength"] = min(given, _MOST_CHARS[form]) if is_number(given) else given
        if form == "email":
            conjoin(schema, {"pattern": _MAIL})


# --- objects --------------------------------------------------------------------------------------


def _check_fewest(schema: JsonObject, place: _Place) -> None:
    """A name that is free may come twice, and is one member to a reader.  Raises NotExact."""
    fewest = schema.get("minProperties")
    has_free = "patternProperties" in schema or schema.get("additionalProperties") is not False
    if has_free and isinstance(fewest, int) and fewest > len({*required(schema)}) + 1:
        at = f"{place}.minProperties".removeprefix(".")
        raise NotExact(f"{at}: {fewest} different names cannot be kept; list them in required")
