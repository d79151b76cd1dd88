"""Expressions and statements of models: Python's syntax, in a form that both writers print.

An expression is made of variables, numbers, `True`, `False`, names of states and quoted values,
`and`, `or`, `not`, comparisons, `in (...)`, `+`, `-` and `a if c else b`.  `me.retry` is the
variable `retry` of the end whose row is expanded, `other.retry` that of the other end.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Assign:
    """A variable gets a value; statements happen one after another."""

    name: str
    value: ast.expr


@dataclass(frozen=True, slots=True)
class Require:
    """What must hold here; if not, `law` (a name made of its words) is broken."""

    holds: ast.expr
    law: str
    words: str


Statement = Assign | Require
Body = tuple[str, ...]
"""Statements as text: `name = expression`, or `require expression -- law in words`."""


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


Replacing = Callable[[ast.expr], ast.expr | None]


def _rebuilt(node: Any, instead: Replacing) -> Any:
    """The tree with other expressions in it where `instead` has one; trees are shared, and never
    changed."""
    if isinstance(node, list):
        return [_rebuilt(part, instead) for part in node]
    if not isinstance(node, ast.expr):
        return node
    other = instead(node)
    if other is not None:
        return other
    fields = ast.iter_fields(node)
    return type(node)(**{name: _rebuilt(value, instead) for name, value in fields})


@cache
def _owned(text: str, owners: tuple[tuple[str, str], ...]) -> ast.expr:
    """`me.retry` becomes `producer_retry`."""
    names = dict(owners)

    def instead(node: ast.expr) -> ast.expr | None:
        if not isinstance(node, ast.Attribute):
            return None
        assert isinstance(node.value, ast.Name), "one dot at most"
        return ast.Name(f"{names[node.value.id]}_{node.attr}")

    tree: ast.expr = _rebuilt(_parsed(text), instead)
    return tree


def expression(text: str, owners: Mapping[str, str] | None = None) -> ast.expr:
    """The text as a tree.  Raises SyntaxError."""
    return _owned(text, tuple(owners.items())) if owners else _parsed(text)


def replaced(tree: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """The expression with variables replaced by what they are worth."""

    def instead(node: ast.expr) -> ast.expr | None:
        return values.get(node.id) if isinstance(node, ast.Name) else None

    result: ast.expr = _rebuilt(tree, instead) if values else tree
    return result


def statements(body: Body, owners: Mapping[str, str] | None = None) -> tuple[Statement, ...]:
    """The statements of a body.  Raises SyntaxError."""
    return tuple(_statement(text, owners) for text in body)


def _statement(text: str, owners: Mapping[str, str] | None) -> Statement:
    if text.startswith("require "):
        condition, _, words = text.removeprefix("require ").partition(" -- ")
        law = "".join(c if c.isalnum() else "_" for c in words)
        return Require(expression(condition, owners), law, words)
    name, _, value = text.partition(" = ")
    target = expression(name, owners)
    assert isinstance(target, ast.Name), f"{text!r} assigns to no variable"
    return Assign(target.id, expression(value, owners))


def worth(done: Iterable[Statement], start: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """What variables are worth after statements, in terms of what they were before the first."""
    values = dict(start)
    for statement in done:
        if isinstance(statement, Assign):
            values[statement.name] = replaced(statement.value, values)
    return values


def is_true(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Constant) and tree.value is True


def is_false(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Constant) and tree.value is False


def both(*trees: ast.expr) -> ast.expr:
    """The conjunction, without what is plainly true."""
    if any(map(is_false, trees)):
        return ast.Constant(False)
    wanted = [tree for tree in trees if not is_true(tree)]
    if len(wanted) < 2:
        return wanted[0] if wanted else ast.Constant(True)
    return ast.BoolOp(ast.And(), wanted)


def negated(tree: ast.expr) -> ast.expr:
    if isinstance(tree, ast.Constant):
        return ast.Constant(not tree.value)
    return ast.UnaryOp(ast.Not(), tree)


@dataclass(frozen=True, slots=True)
class ExpressionWords:
    """How a language writes what expressions are made of."""

    both: str
    either: str
    no: str
    yes: str
    nay: str
    equal: str
    unequal: str
    at_most: str
    choice: str  # of condition, one, other

    def value(self, name: str) -> str:
        """A state or quoted value."""
        raise NotImplementedError

    def among(self, one: str, values: list[str]) -> str:
        raise NotImplementedError


def printed(tree: ast.expr, words: ExpressionWords, variables: frozenset[str]) -> str:
    """The expression in a language.  Raises AssertionError for what no language has."""

    def show(node: ast.expr) -> str:
        match node:
            case ast.Constant(bool(value)):
                return words.yes if value else words.nay
            case ast.Constant(int(value)):
                return str(value)
            case ast.Constant(str(value)):
                return words.value(value)
            case ast.Name(name):
                return name if name in variables else words.value(name)
            case ast.BoolOp(ast.And(), parts):
                return "(" + f" {words.both} ".join(map(show, parts)) + ")"
            case ast.BoolOp(ast.Or(), parts):
                return "(" + f" {words.either} ".join(map(show, parts)) + ")"
            case ast.UnaryOp(ast.Not(), part):
                return f"{words.no}({show(part)})"
            case ast.IfExp(test, one, other):
                return words.choice.format(show(test), show(one), show(other))
            case ast.BinOp(left, ast.Add() | ast.Sub() as sign, right):
                return f"({show(left)} {'+' if isinstance(sign, ast.Add) else '-'} {show(right)})"
            case ast.Compare(left, [sign], [right]):
                return compare(show(left), sign, right)
        raise AssertionError(f"no language has {ast.unparse(node)}")

    def compare(left: str, sign: ast.cmpop, right: ast.expr) -> str:
        if isinstance(sign, ast.In | ast.NotIn):
            assert isinstance(right, ast.Tuple)
            found = words.among(left, [show(value) for value in right.elts])
            return found if isinstance(sign, ast.In) else f"{words.no}({found})"
        signs = {ast.Eq: words.equal, ast.NotEq: words.unequal, ast.Lt: "<", ast.Gt: ">"}
        signs |= {ast.LtE: words.at_most, ast.GtE: ">="}
        return f"({left} {signs[type(sign)]} {show(right)})"

    return show(tree)
