"""Regular expressions, Lark and EBNF that strangers might send: chains, depths, counts, rubbish."""

from __future__ import annotations

import random

MAX_DEPTH = 5
COUNTS = ("*", "+", "?", "{0}", "{1,3}", "{7}", "{1000}", "{0,100000}", "{2,1}", "{3,}", "*?")
ATOMS = (
    *("a", "b", ".", "[a-z]", "[^a]", r"\d", r"\w", r"\s", r"\p{L}", r"\u00e9", "é", "\U0001f600"),
    *(r"\.", "(?:ab)", r"\x00", "[]", "[z-a]", "^", "$", r"\b", r"(?=a)", r"\1", "(?i)k", "\ud83d"),
)
RUBBISH = ("", "(", ")", "[", "\\", "/", '"', "#", "//", "\x00", "%", "%json {", "|", "~", "\n")


def regex(seed: int) -> str:
    draw = random.Random(seed)
    if draw.random() < 0.15:
        return _nested(draw, draw.choice(("({})", "(a|{})", "({})*", "(?:{}b)+", "({}{{2}})")), "a")
    if draw.random() < 0.1:
        return draw.choice(("|", "")).join(_regex(draw, 3) for _ in range(draw.randrange(500)))
    return _regex(draw, 0)


def _regex(draw: random.Random, depth: int) -> str:
    kind = draw.random()
    if depth >= MAX_DEPTH or kind < 0.3:
        return draw.choice(ATOMS[:12] if draw.random() < 0.9 else ATOMS)
    if kind < 0.6:
        return "".join(_regex(draw, depth + 1) for _ in range(draw.randrange(1, 5)))
    if kind < 0.75:
        return f"({'|'.join(_regex(draw, depth + 1) for _ in range(draw.randrange(1, 5)))})"
    return f"({_regex(draw, depth + 1)}){draw.choice(COUNTS)}"


def _nested(draw: random.Random, form: str, inner: str) -> str:
    before, _, after = form.replace("{{", "{").replace("}}", "}").partition("{}")
    count = int(10 ** draw.uniform(0, 4))
    return before * count + inner + after * count


def counts(seed: int) -> str:
    """Counts of counts, of alternatives that overlap: what is told of an answer grows with it."""
    draw = random.Random(seed)
    found = draw.choice((*ATOMS[:7], "[ab]", "(a|ab|b)"))
    for _ in range(draw.randrange(1, 5)):
        most = int(10 ** draw.uniform(0, 3.3))
        least = draw.choice(("0,", "1,", "", f"{most},"))
        count = draw.choice((f"{{{least}{most}}}", f"{{{most},}}", "+", "*"))
        more = draw.choice(("", "", " ?", "[ab]?", "b", f"[ab]{{0,{most}}}", "|[a-c]{2,9}"))
        found = f"({found}{count}{more})"
    return found + draw.choice(("", "{1,50}", "{1,1000}", "*", "{20}"))


def grammar(seed: int) -> str:
    """Lark or EBNF."""
    draw = random.Random(seed)
    text = draw.choice((_rules, _rules, _chain, _chain, _deep, _counted, _recursive, _ebnf))(draw)
    if draw.random() < 0.1:
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(RUBBISH) + text[at:]
    return text


def _terminal(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.5:
        return f'"{draw.choice(("a", "b", "ab", "é", " ", "<|im_end|>", "x" * 300))}"'
    return f"/{regex(draw.getrandbits(32)).replace('/', '')}/" if kind < 0.9 else "%json {}"


def _expression(draw: random.Random, names: list[str], depth: int = 0) -> str:
    kind = draw.random()
    if depth >= MAX_DEPTH or kind < 0.35:
        return draw.choice(names) if draw.random() < 0.6 else _terminal(draw)
    parts = [_expression(draw, names, depth + 1) for _ in range(draw.randrange(1, 4))]
    if kind < 0.6:
        return " ".join(parts)
    if kind < 0.8:
        return f"({' | '.join(parts)})"
    return f"({parts[0]}){draw.choice(COUNTS[:-1])}"


def _rules(draw: random.Random) -> str:
    names = [f"r{i}" for i in range(draw.randrange(1, 12))]
    names += [f"T{i}" for i in range(draw.randrange(4))]
    lines = [f"start: {_expression(draw, names)}"]
    for name in names:
        joined = _terminal(draw) if name[0] == "T" else _expression(draw, names)
        lines.append(f"{name}: {joined}  {draw.choice(('', '// x', '# x'))}")
    if draw.random() < 0.3:
        lines.append(
            draw.choice(("%ignore /[ ]+/", "%import common.INT", "%llguidance {}", "T0: T0"))
        )
    if draw.random() < 0.2:
        lines.append(f"T9: {_terminal(draw)} & ~{_terminal(draw)}")
    return "\n".join(lines)


def _chain(draw: random.Random) -> str:
    length = int(10 ** draw.uniform(0, 3.6))
    form = draw.choice(("{}", '"a" {}', '{} "a"', "{}?", '{} | "b"', '("x" {})*', "{}{{2}}"))
    name = draw.choice("rA")
    lines = [f"{name}{i:x}:{form.format(f'{name}{i + 1:x}')}" for i in range(length)]
    return f'start:{name}0\n{chr(10).join(lines)}\n{name}{length:x}:"b"'


def _deep(draw: random.Random) -> str:
    form = draw.choice(
        ("({})", "({})?", '("a" | {})', "({})*", "[{}]", "({}){{2}}", '("a" {} "b")')
    )
    return f"start: {_nested(draw, form, draw.choice(('start', chr(34) + 'a' + chr(34))))}"


def _counted(draw: random.Random) -> str:
    count = draw.choice((10, 1000, 10**5, 10**9, 2**31, 2**32, 2**64))
    inner = draw.choice(('"a"', "/a+/", "r", '("a" | r)', "A"))
    repeated = draw.choice(
        ("{inner}{{{count}}}", "{inner}{{0,{count}}}", "({inner}{{{count}}}){{{count}}}")
    )
    return f'start: {repeated.format(inner=inner, count=count)}\nr: "b" | "c" r\nA: /x{{{count}}}/'


def _recursive(draw: random.Random) -> str:
    bodies = (
        *('"a" start | "b"', 'start "a" | "b"', '"a" start "c" | "b"', 'start start | "a" | ""'),
        *("start start start | /[ab]+/", "start", '(start "a")* | "b"', 'start? start? "a"'),
    )
    return f"start: {draw.choice(bodies)}"


def _ebnf(draw: random.Random) -> str:
    names = ["one", "two", "three"]
    lines = [f"root ::= {_expression(draw, names)}"]
    lines += [
        f"{name} ::= {draw.choice(('[a-z]+', _expression(draw, names)))}"
        for name in names[: draw.randrange(4)]
    ]
    return "\n".join(lines)
