"""What a setting is: its kind, with unit and bounds, one line of help, and perhaps a flag.

All of it stands beside the field, as msgspec's `Meta`: `max_images: Annotated[Count, about("of one
request")] = 16`.  msgspec holds to the bounds wherever a configuration is decoded; flags, sentences
about wrong values and the page of settings are read from here (`settings`).  A field that is
`fixed` is a constant with a reason: the simulator and tests shorten it, operators do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(gt=0, extra={"metavar": "N"})]
CountOrNone = Annotated[int, Meta(ge=0, extra={"metavar": "N"})]
Nbytes = Annotated[int, Meta(gt=0, extra={"unit": "bytes", "metavar": "SIZE"})]
NbytesOrNone = Annotated[int, Meta(ge=0, extra={"unit": "bytes", "metavar": "SIZE"})]
Seconds = Annotated[float, Meta(gt=0, extra={"unit": "s", "metavar": "SECONDS"})]
SecondsOrNone = Annotated[float, Meta(ge=0, extra={"unit": "s", "metavar": "SECONDS"})]
Milliseconds = Annotated[float, Meta(ge=0, extra={"unit": "ms", "metavar": "MS"})]
Factor = Annotated[float, Meta(ge=0, extra={"metavar": "FACTOR"})]
Share = Annotated[float, Meta(gt=0, le=1, extra={"unit": "share", "metavar": "SHARE"})]
ShareOrNone = Annotated[float, Meta(ge=0, le=1, extra={"unit": "share", "metavar": "SHARE"})]
Port = Annotated[int, Meta(gt=0, le=65535, extra={"unit": "port", "metavar": "PORT"})]
PortOrAny = Annotated[int, Meta(ge=0, le=65535, extra={"unit": "port", "metavar": "PORT"})]
Texts = tuple[Annotated[str, Meta(min_length=1)], ...]


def about(
    text: str, flag: str = "", group: str = "", metavar: str = "", *, short: str = ""
) -> Meta:
    """One line of help; `group`: of flags that are listed together; `short`: the flag,
    abbreviated."""
    given = {"flag": flag, "group": group, "metavar": metavar, "short": short}
    return Meta(description=text, extra={name: word for name, word in given.items() if word})


def fixed(text: str, reason: str) -> Meta:
    """A constant, and why no operator needs another value."""
    return Meta(description=text, extra={"fixed": reason})


def matches(pattern: str, must: str) -> Meta:
    """A text that msgspec checks with `pattern`; `must` is the sentence for a wrong one."""
    return Meta(pattern=pattern, extra={"must": must})


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the configuration, with its texts and bounds."""

    key: str  # dotted
    annotation: Any  # as msgspec converts it
    type: Any  # int, float, bool, str or a tuple of str
    default: Any
    choices: tuple[str, ...]
    text: str
    extra: Mapping[str, str]  # unit, metavar, flag, group, fixed, must
    bounds: Mapping[str, float]  # gt, ge, le

    @property
    def unit(self) -> str:
        return self.extra.get("unit", "")

    @property
    def flag(self) -> str:
        return self.extra.get("flag", "")

    @property
    def fixed(self) -> str:
        """Why it is a constant; empty: it is none."""
        return self.extra.get("fixed", "")

    @property
    def range(self) -> str:
        """Its bounds or choices in words; empty: any value of its type."""
        if self.choices:
            return ", ".join(filter(None, self.choices))
        signs = {"gt": "above", "ge": "from", "le": "at most"}
        return ", ".join(f"{signs[name]} {value:g}" for name, value in self.bounds.items())

    def in_words(self, value: Any) -> str:
        """As one would write it; empty for no text, no list and a switch that is off."""
        if value is False or value in ("", ()):
            return ""
        if value is True:
            return "true"
        if self.unit == "bytes" and value:
            power = min((value & -value).bit_length() - 1, 39) // 10
            return f"{value >> 10 * power}{('', 'KiB', 'MiB', 'GiB')[power]}"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def problem(self, value: Any) -> str:
        """What is wrong with a value of its type, in half a sentence; empty if nothing."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._out_of_bounds(value)
        if self.choices and value not in self.choices:
            return f"it must be one of {self.range}"
        try:
            msgspec.convert(value, self.annotation)
        except msgspec.ValidationError:
            return self.extra.get("must", "none of them may be empty")
        return ""

    def _out_of_bounds(self, value: float) -> str:
        if value <= self.bounds.get("gt", -math.inf):
            return "it must be above zero"
        if value < self.bounds.get("ge", -math.inf):
            return "it may not be negative"
        if not math.isfinite(value):
            return "it must be a finite number"
        most = self.bounds.get("le", math.inf)
        what = f"a {self.unit}" if self.unit else "it"
        return f"{what} is at most {most:g}" if value > most else ""


def settings(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[Setting]:
    """Every field of a struct of structs, in order; keys have dots."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, f"{prefix}{field.name}.")
        else:
            yield _setting(prefix + field.name, field.type, field.default)


def _setting(key: str, annotation: Any, default: Any) -> Setting:
    kind, *found = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    metas = [meta for meta in found if isinstance(meta, Meta)]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    bounds = {
        name: value
        for meta in metas
        for name in ("gt", "ge", "le")
        if (value := getattr(meta, name)) is not None
    }
    extra = {name: word for meta in metas for name, word in (meta.extra or {}).items()}
    text = next((meta.description for meta in metas if meta.description), "")
    is_list = get_origin(kind) is tuple
    plain = tuple[str, ...] if is_list else str if choices else kind
    return Setting(key, annotation, plain, default, choices, text, extra, bounds)
