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


def with_fields(node: ast.AST, **fields: object) -> ast.AST:
    replacement = copy.copy(node)
    for name, value in fields.items():
        setattr(replacement, name, value)
    return replacement


def altered(node: ast.AST, **fields: object) -> Change:
    """The node with other fields."""
    return becomes(node, with_fields(node, **fields))


def is_logging(node: ast.AST) -> bool:
    """Whether a call only writes a line for a reader."""
    names = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else []
    return len(names) > 1 and names[-2] in {"log", "_log", "logger"}


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def each_left_out(items: list[ast.expr]) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
    """Each item, and the list without it."""
    for index, item in enumerate(items):
        yield item, items[:index] + items[index + 1 :]


# --- statements -----------------------------------------------------------------------------------


@operator
def drop_statement(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Forget a call, a wake-up, a release, an assignment that others see, an early exit."""
    match node:
        case (
            ast.Expr(value=ast.Call() | ast.Await())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | ast.AnnAssign(target=ast.Attribute() | ast.Subscript())
            | (ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break())
            | ast.Return(value=None)
        ):
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
    match node:
        case (ast.FunctionDef() | ast.AsyncFunctionDef()) as function:
            half = (len(function.body) + 1) // 2
            is_procedure = function.returns is not None and ast.unparse(function.returns) == "None"
            is_documented = ast.get_docstring(function) is not None
            if len(function.body) > 1 and is_procedure and not (half == 1 and is_documented):
                shorter = with_fields(node, body=function.body[:half])
                yield Change(shorter, f"{first_line(function.body[half])} ...", "return")


@operator
def only_the_first(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.For) and not isinstance(node.body[-1], ast.Return | ast.Break):
        head = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
        shorter = with_fields(node, body=[*node.body, ast.Break()])
        yield Change(shorter, head, f"{head}: ... break")


@operator
def drop_finally(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Try) and node.finalbody:
        shorter = with_fields(node, finalbody=[ast.Pass()])
        yield Change(shorter, f"finally: {ast.unparse(node.finalbody[0])}", "finally: pass")


@operator
def do_not_handle(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.ExceptHandler):
        head = f"except {ast.unparse(node.type) if node.type else ''}"
        raising = with_fields(node, body=[ast.Raise()])
        yield Change(raising, f"{head}: {ast.unparse(node.body[0])}", f"{head}: raise")


# --- conditions -----------------------------------------------------------------------------------


@operator
def negate_condition(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    match parent:
        case ast.If(test=it) | ast.While(test=it) | ast.IfExp(test=it) if it is node:
            pass
        case ast.comprehension(ifs=conditions) if node in conditions:
            pass
        case ast.Return() if is_truth(node):
            pass
        case _:
            return
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=opposite):
            yield becomes(node, opposite)
        case ast.expr():
            yield becomes(node, ast.UnaryOp(ast.Not(), node))


def is_truth(node: ast.AST) -> bool:
    match node:
        case ast.BoolOp(values=values):
            return any(map(is_truth, values))
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
    return False


def either_way(*pairs: tuple[type, type]) -> dict[type, type]:
    return dict(pairs) | {b: a for a, b in pairs}


BOUNDS = either_way((ast.Lt, ast.LtE), (ast.Gt, ast.GtE))
OPPOSITES = either_way((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))


@operator
def move_bound(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, kind in enumerate(map(type, node.ops)):
            if kind in BOUNDS:
                yield altered(node, ops=[*node.ops[:index], BOUNDS[kind](), *node.ops[index + 1 :]])


@operator
def negate_part(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """One part of a condition; the whole is `negate_condition`'s."""
    match parent, node:
        case ast.BoolOp(), ast.Compare(ops=[kind]) if type(kind) in OPPOSITES:
            yield altered(node, ops=[OPPOSITES[type(kind)]()])


@operator
def swap_and_or(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        yield altered(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


@operator
def drop_part(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """One part of a condition, or of what two tuples must have in common (a key's epoch)."""
    match node:
        case ast.BoolOp(op=op, values=values):
            for _, rest in each_left_out(values):
                yield becomes(node, rest[0] if len(rest) == 1 else ast.BoolOp(op, rest))
        case ast.Compare(left=ast.Tuple(elts=left), comparators=[ast.Tuple(elts=right)]):
            for (_, a), (_, b) in zip(each_left_out(left), each_left_out(right), strict=False):
                one, other = ast.Tuple(a, ast.Load()), ast.Tuple(b, ast.Load())
                yield altered(node, left=one, comparators=[other])


# --- values ---------------------------------------------------------------------------------------


@operator
def forget_the_epoch(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Take one life of an instance for another."""
    match node:
        case ast.Attribute(attr="epoch", ctx=ast.Load()) | ast.Name(id="epoch", ctx=ast.Load()):
            yield becomes(node, ast.Constant(0))


def constant(node: ast.Constant, parent: ast.AST, value: object) -> Change:
    """It says little: it is told with the first line of what is around it."""
    is_code = isinstance(parent, ast.stmt | ast.expr | ast.keyword)
    where = f" in {first_line(parent)}" if is_code else ""
    return Change(ast.Constant(value), f"{node.value!r}{where}", repr(value))


@operator_anywhere
def off_by_one(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Constant(value=value) if type(value) is int and value <= 2:
            if not isinstance(parent, ast.Subscript | ast.UnaryOp):
                yield constant(node, parent, value + 1)


@operator_anywhere
def other_truth(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    is_assertion = isinstance(parent, ast.keyword) and parent.arg == "strict"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool) and not is_assertion:
        yield constant(node, parent, not node.value)


ARITHMETIC = either_way((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)) | {ast.Div: ast.Mult}


@operator
def other_arithmetic(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield altered(node, op=ARITHMETIC[type(node.op)]())


NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
METHODS = {"popleft": "pop", "appendleft": "append"}
LAST = ast.UnaryOp(ast.USub(), ast.Constant(1))


@operator
def swap_first_and_last(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Subscript(slice=ast.Constant(value=0)):
            yield altered(node, slice=LAST)
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
            yield becomes(node, ast.Subscript(everything, LAST, ast.Load()))


@operator
def drop_argument(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Leave a named argument to its default."""
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        # a row's note is for readers; what `strict` says is asserted, and true
        if keyword.arg not in {None, "note", "strict"}:
            yield altered(node, keywords=[k for k in node.keywords if k is not keyword])


@operator
def drop_slice_bound(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    for bound in ("lower", "upper") if isinstance(node, ast.Slice) else ():
        if getattr(node, bound) is not None:
            rest = with_fields(node, **{bound: None})
            yield Change(rest, f"[{ast.unparse(node)}]", f"[{ast.unparse(rest)}]")


# --- tables ---------------------------------------------------------------------------------------

TARGET, ACTION = 2, 4  # places in `Row`


@operator_anywhere
def drop_row(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a table: a row, or a line of what is ignored."""
    for item, rest in each_left_out(node.elts) if isinstance(node, ast.Tuple) else ():
        match item:
            case ast.Call(func=ast.Name(id="Row" | "Ignore")):
                yield Change(with_fields(node, elts=rest), ast.unparse(item), "(no row)")


@operator_anywhere
def drop_member(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a tuple of states or effects."""
    if isinstance(node, ast.Tuple) and all(map(is_member, node.elts)):
        for item, rest in each_left_out(node.elts):
            before = f"{ast.unparse(item)} in {first_line(parent)}"
            yield Change(with_fields(node, elts=rest), before, "(dropped)")


def is_member(node: ast.AST) -> bool:
    match node:
        case ast.Starred(value=ast.Name()) | ast.Attribute(value=ast.Name(id="S" | "Do")):
            return True
    return False


def without_place(row: ast.AST, place: int) -> Iterator[Change]:
    """Nothing there, if there is something."""
    match row:
        case ast.Call(func=ast.Name(id="Row"), args=args) if len(args) > place:
            if not isinstance(args[place], ast.Constant):
                nothing = ast.Constant(value=None)
                yield altered(row, args=[*args[:place], nothing, *args[place + 1 :]])


@operator_anywhere
def forget_the_action(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a row: it changes no field."""
    yield from without_place(node, ACTION)
    match node:
        case ast.Call(func=ast.Name(id="Row"), keywords=keywords):
            if any(keyword.arg == "do" for keyword in keywords):
                yield altered(node, keywords=[k for k in keywords if k.arg != "do"])


@operator_anywhere
def stay(node: ast.AST, parent: ast.AST) -> Iterator[Change]:
    """Of a row: the state remains."""
    yield from without_place(node, TARGET)
