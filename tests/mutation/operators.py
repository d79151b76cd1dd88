"""The small slips that are planted: each operator says what a node of the syntax could wrongly be.

An operator takes a node and its parent, and yields the changes.  It must leave the given node as it
is.  What only a reader sees is left out: log lines, the text of errors, annotations.  Numbers above
two are tunings, which no test can know.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """What stands instead of a node; the texts tell it to a reader, and name it."""

    replacement: ast.AST
    before: str
    after: str


Operator = Callable[[ast.AST, ast.AST], Iterator[Change]]
IN_FUNCTIONS: dict[str, Operator] = {}
ANYWHERE: dict[str, Operator] = {}


def operator(function: Operator) -> Operator:
    IN_FUNCTIONS[function.__name__] = function
    return function


def operator_anywhere(function: Operator) -> Operator:
    """Of one that makes sense at module level, too."""
    ANYWHERE[function.__name__] = function
    return operator(function)


def becomes(node: ast.AST, replacement: ast.AST) -> Change:
    return Change(replacement, ast.unparse(node), ast.unparse(replacement))


def altered(node: ast.AST, **fields: object) -> Change:
    """The node with other fields."""
    replacement = copy.copy(node)
    for name, value in fields.items():
        setattr(replacement, name, value)
    return becomes(node, replacement)


def is_logging(node: ast.AST) -> bool:
    """Whether a call only writes a line for a reader."""
    function = node.func if isinstance(node, ast.Call) else None
    names = ast.unparse(function).split(".") if function is not None else []
    return len(names) > 1 and names[-2] in {"log", "_log", "logger"}


def without(items: list[ast.expr], index: int) -> list[ast.expr]:
    return items[:index] + items[index + 1 :]


# --- statements -----------------------------------------------------------------------------------


@operator
def drop_statement(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Forget a call, a wake-up, a release, an assignment that others see, an early exit."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()):
            pass
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            pass
        case ast.AnnAssign(target=ast.Attribute() | ast.Subscript()):
            pass
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            pass
        case ast.Return(value=None):
            pass
        case _:
            return
    yield becomes(node, ast.Pass())


@operator
def drop_branch(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Forget an early exit together with its condition."""
    exits = ast.Return | ast.Raise | ast.Continue | ast.Break
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], exits):
        yield Change(ast.Pass(), f"if {ast.unparse(node.test)}: ...", "pass")


@operator_anywhere
def return_early(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Leave out the second half of what a procedure does."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
        return
    if not (isinstance(node.returns, ast.Constant) and node.returns.value is None):
        return
    half = (len(node.body) + 1) // 2
    if half == 1 and ast.get_docstring(node) is not None:
        return
    shorter = copy.copy(node)
    shorter.body = node.body[:half]
    yield Change(shorter, ast.unparse(node.body[half]).split("\n")[0] + " ...", "return")


@operator
def only_the_first(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.For) and not isinstance(node.body[-1], ast.Return | ast.Break):
        shorter = copy.copy(node)
        shorter.body = [*node.body, ast.Break()]
        head = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
        yield Change(shorter, head, f"{head}: ... break")


@operator
def drop_finally(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Try) and node.finalbody:
        replacement = copy.copy(node)
        replacement.finalbody = [ast.Pass()]
        yield Change(replacement, f"finally: {ast.unparse(node.finalbody[0])}", "finally: pass")


@operator
def do_not_handle(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.ExceptHandler):
        replacement = copy.copy(node)
        replacement.body = [ast.Raise()]
        head = f"except {ast.unparse(node.type) if node.type else ''}"
        yield Change(replacement, f"{head}: {ast.unparse(node.body[0])}", f"{head}: raise")


# --- conditions -----------------------------------------------------------------------------------

TESTED = ast.If | ast.While | ast.IfExp


def negation(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return ast.UnaryOp(ast.Not(), node)


@operator
def negate_condition(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.expr):
        return
    in_comprehension = isinstance(parent, ast.comprehension) and node in parent.ifs
    returned = isinstance(parent, ast.Return) and is_truth(node)
    if (isinstance(parent, TESTED) and parent.test is node) or in_comprehension or returned:
        yield becomes(node, negation(node))


def is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return any(is_truth(value) for value in node.values)
    return isinstance(node, ast.Compare) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


BOUNDS: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITES: dict[type, type] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@operator
def move_bound(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, kind in enumerate(node.ops):
            if type(kind) in BOUNDS:
                ops = [*node.ops]
                ops[index] = BOUNDS[type(kind)]()
                yield altered(node, ops=ops)


@operator
def negate_part(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """One part of a condition; the whole is `negate_condition`'s."""
    if isinstance(node, ast.Compare) and isinstance(parent, ast.BoolOp):
        kind = type(node.ops[0])
        if len(node.ops) == 1 and kind in OPPOSITES:
            yield altered(node, ops=[OPPOSITES[kind]()])


@operator
def swap_and_or(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        yield altered(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


@operator
def drop_part(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """One part of a condition, or of what two tuples must have in common (a key's epoch)."""
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            rest = without(node.values, index)
            yield becomes(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
    match node:
        case ast.Compare(left=ast.Tuple(elts=left), comparators=[ast.Tuple(elts=right)]):
            for index in range(min(len(left), len(right))):
                yield altered(
                    node,
                    left=ast.Tuple(without(left, index), ast.Load()),
                    comparators=[ast.Tuple(without(right, index), ast.Load())],
                )


# --- values ---------------------------------------------------------------------------------------


@operator
def forget_the_epoch(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Take one life of an instance for another."""
    match node:
        case ast.Attribute(attr="epoch", ctx=ast.Load()) | ast.Name(id="epoch", ctx=ast.Load()):
            yield becomes(node, ast.Constant(0))


@operator_anywhere
def off_by_one(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(parent, ast.Subscript | ast.UnaryOp):
        return
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= 2:
        yield Change(ast.Constant(node.value + 1), *_in(parent, node, node.value + 1))


@operator_anywhere
def other_truth(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    is_assertion = isinstance(parent, ast.keyword) and parent.arg == "strict"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool) and not is_assertion:
        yield Change(ast.Constant(not node.value), *_in(parent, node, not node.value))


def _in(parent: ast.AST, node: ast.Constant, value: object) -> tuple[str, str]:
    """A constant says little: it is told with the first line of what is around it."""
    if isinstance(parent, ast.stmt | ast.expr | ast.keyword):
        text = ast.unparse(parent).split("\n")[0]
        return f"{node.value!r} in {text}", repr(value)
    return repr(node.value), repr(value)


ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


@operator
def other_arithmetic(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield altered(node, op=ARITHMETIC[type(node.op)]())


NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
METHODS = {"popleft": "pop", "appendleft": "append"}


@operator
def swap_first_and_last(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Subscript(slice=ast.Constant(value=0)):
            yield altered(node, slice=ast.UnaryOp(ast.USub(), ast.Constant(1)))
        case ast.Subscript(slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1))):
            yield altered(node, slice=ast.Constant(0))
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield altered(node, func=ast.Name(NAMES[name], ast.Load()))
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in METHODS:
            yield altered(node, func=ast.Attribute(owner, METHODS[attr], ast.Load()))
        case ast.Call(func=ast.Name(id="reversed"), args=[item]):
            yield becomes(node, item)
        case ast.Call(func=ast.Name(id="sorted"), keywords=keywords):
            if not any(keyword.arg == "reverse" for keyword in keywords):
                reverse = ast.keyword("reverse", ast.Constant(value=True))
                yield altered(node, keywords=[*keywords, reverse])
        case ast.Call(func=ast.Name(id="next"), args=[ast.Call(ast.Name(id="iter"), [item]), *_]):
            everything = ast.Call(ast.Name("list", ast.Load()), [item], [])
            last = ast.UnaryOp(ast.USub(), ast.Constant(1))
            yield becomes(node, ast.Subscript(everything, last, ast.Load()))


@operator
def drop_argument(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Leave a named argument to its default."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            # a row's note is for readers; what `strict` says is asserted, and true
            if keyword.arg not in {None, "note", "strict"}:
                rest = [other for other in node.keywords if other is not keyword]
                yield altered(node, keywords=rest)


@operator
def drop_slice_bound(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if getattr(node, bound) is not None:
                replacement = copy.copy(node)
                setattr(replacement, bound, None)
                yield Change(replacement, f"[{ast.unparse(node)}]", f"[{ast.unparse(replacement)}]")


# --- tables ---------------------------------------------------------------------------------------

TARGET, ACTION = 2, 4  # places in `Row`


def is_call_of(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


@operator_anywhere
def drop_row(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a table: a row, or a line of what is ignored."""
    if isinstance(node, ast.Tuple):
        for index, item in enumerate(node.elts):
            if is_call_of(item, "Row", "Ignore"):
                shorter = ast.Tuple(without(node.elts, index), node.ctx)
                yield Change(shorter, ast.unparse(item), "(no row)")


@operator_anywhere
def drop_member(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a tuple of states or effects."""
    if isinstance(node, ast.Tuple) and node.elts and all(map(is_member, node.elts)):
        for index, item in enumerate(node.elts):
            shorter = ast.Tuple(without(node.elts, index), node.ctx)
            where = ast.unparse(parent).split("\n")[0]
            yield Change(shorter, f"{ast.unparse(item)} in {where}", "(dropped)")


def is_member(node: ast.AST) -> bool:
    if isinstance(node, ast.Starred):
        return isinstance(node.value, ast.Name)
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id in {"S", "Do"})
    )


@operator_anywhere
def forget_the_action(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a row: it changes no field."""
    if is_call_of(node, "Row") and isinstance(node, ast.Call):
        nothing = ast.Constant(value=None)
        if len(node.args) > ACTION and not isinstance(node.args[ACTION], ast.Constant):
            args = [*node.args[:ACTION], nothing, *node.args[ACTION + 1 :]]
            yield altered(node, args=args)
        if any(keyword.arg == "do" for keyword in node.keywords):
            yield altered(node, keywords=[k for k in node.keywords if k.arg != "do"])


@operator_anywhere
def stay(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a row: the state remains."""
    if not (is_call_of(node, "Row") and isinstance(node, ast.Call)):
        return
    if len(node.args) > TARGET and not isinstance(node.args[TARGET], ast.Constant):
        nowhere = ast.Constant(value=None)
        yield altered(node, args=[*node.args[:TARGET], nowhere, *node.args[TARGET + 1 :]])
