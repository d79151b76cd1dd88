"""Expressions and statements of models: Python's syntax, in a form that both writers print.

An expression is made of variables, numbers, `True`, `False`, names of states and quoted values,
`and`, `or`, `not`, comparisons, `in (...)`, `+`, `-` and `a if c else b`.  `me.retry` is the
variable `retry` of the end whose row is expanded, `other.retry` that of the other end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache


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


class _Replaced(ast.NodeTransformer):
    """Names, and attributes as `owner.name`, replaced by expressions."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


class _Owned(ast.NodeTransformer):
    """`me.retry` becomes `producer_retry`."""

    def __init__(self, owners: Mapping[str, str]) -> None:
        self._owners = owners

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        assert isinstance(node.value, ast.Name), "one dot at most"
        return ast.Name(f"{self._owners[node.value.id]}_{node.attr}")


def expression(text: str, owners: Mapping[str, str] | None = None) -> ast.expr:
    """The text as a tree.  Raises SyntaxError."""
    tree = ast.parse(text, mode="eval").body if owners else _parsed(text)
    return _Owned(owners).visit(tree) if owners else tree


def replaced(tree: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """The expression with variables replaced by what they are worth."""
    if not values:
        return tree
    copy = ast.parse(ast.unparse(tree), mode="eval").body
    result: ast.expr = _Replaced(values).visit(copy)
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
class Words:
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


def printed(tree: ast.expr, words: Words, variables: frozenset[str]) -> str:
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
