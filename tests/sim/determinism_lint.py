"""What would make two runs of the same plan differ, found in the syntax of a module.

Clocks, randomness and threads, also bound early (`from time import monotonic`, a default argument);
what the event loop does in the order of addresses (`TaskGroup`, `asyncio.wait`, `as_completed`);
iteration over a set, whatever made it: a display, a call, an operator, a name or attribute that was
annotated or assigned as one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODULES = {"time", "random", "uuid", "secrets", "threading", "datetime", "concurrent", "os"}
CALLS = {"TaskGroup", "as_completed", "to_thread", "get_event_loop", "run_in_executor", "id"}
LOOP_METHODS = {"wait"}  # of asyncio: returns sets
SET_MAKERS = {"set", "frozenset"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
IN_ORDER = {"sorted", "len", "min", "max", "any", "all", "bool", *SET_MAKERS}
ITERATING = {"list", "tuple", "iter", "enumerate", "next", "map", "filter", "zip", "dict", "deque"}


def problems(tree: ast.Module) -> list[str]:
    """One line for each."""
    attributes = {name for name in _set_names(ast.walk(tree)) if name.startswith(".")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            attributes |= {f".{name}" for name in _set_names(node.body) if name[0] != "."}
    return _in_scope(tree, tree, attributes)


def _in_scope(scope: ast.AST, tree: ast.Module, known: set[str]) -> list[str]:
    """A module, or a function, which also sees what its surroundings see."""
    nodes = list(_own_nodes(scope))
    sets = known | {name for name in _set_names(nodes) if not name.startswith(".")}
    if isinstance(scope, FUNCTIONS):
        sets |= _set_arguments(scope.args)
    found = [line for node in nodes for line in _node_problems(node, tree, sets)]
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            found += _in_scope(node, tree, sets)
    return found


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a scope; of functions within it, only the function itself."""
    frontier = list(ast.iter_child_nodes(scope))
    while frontier:
        node = frontier.pop(0)
        yield node
        if not isinstance(node, FUNCTIONS):
            frontier.extend(ast.iter_child_nodes(node))


def _node_problems(node: ast.AST, tree: ast.Module, sets: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        modules = [alias.name.split(".")[0] for alias in node.names]
        return [f"{node.lineno}: imports {m}" for m in modules if m in MODULES]
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names} & (CALLS | LOOP_METHODS)
        if node.module == "asyncio" and names:
            return [f"{node.lineno}: imports {', '.join(sorted(names))}"]
        outside = (node.module or "").split(".")[0] in MODULES
        return [f"{node.lineno}: imports from {node.module}"] if outside else []
    if isinstance(node, ast.Call):
        return _call_problems(node, sets)
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        harmless = _makes_a_set(node, tree)
        iterates = is_set(node.iter, sets) and not harmless
        return [f"{node.iter.lineno}: iterates a set: sort it"] if iterates else []
    if isinstance(node, ast.Starred) and is_set(node.value, sets):
        return [f"{node.lineno}: unpacks a set: sort it"]
    return []


def _call_problems(node: ast.Call, sets: set[str]) -> list[str]:
    name = _called(node)
    if name in CALLS:
        return [f"{node.lineno}: calls {name}"]
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if name in LOOP_METHODS and isinstance(owner, ast.Name) and owner.id == "asyncio":
        return [f"{node.lineno}: calls asyncio.{name}"]
    if name == "pop" and owner is not None and not node.args and is_set(owner, sets):
        return [f"{node.lineno}: pops any element of a set"]
    takes = name in ITERATING or name == "join"
    if takes and any(is_set(argument, sets) for argument in node.args):
        return [f"{node.lineno}: {name} of a set: sort it"]
    return []


def _makes_a_set(node: ast.AST, tree: ast.AST) -> bool:
    """A comprehension whose own result has no order, or is asked for nothing that has one."""
    for parent in ast.walk(tree):
        if isinstance(parent, ast.SetComp) and node in parent.generators:
            return True
        if isinstance(parent, ast.Call) and _called(parent) in (*IN_ORDER, "sum"):
            for argument in parent.args:
                if node in getattr(argument, "generators", ()):
                    return True
    return False


def _set_names(nodes: Iterable[ast.AST]) -> set[str]:
    """What is annotated as a set or assigned one; attributes with a dot: `.lost` of `self.lost`."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
            names.add(_dotted(node.target))
        elif isinstance(node, ast.Assign) and is_set(node.value, set()):
            names.update(map(_dotted, node.targets))
    return names - {""}


def _set_arguments(arguments: ast.arguments) -> set[str]:
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {a.arg for a in every if a.annotation is not None and _is_set_type(a.annotation)}


def _is_set_type(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    if isinstance(annotation, ast.BinOp):
        return _is_set_type(annotation.left) or _is_set_type(annotation.right)
    return _name(annotation) in {*SET_MAKERS, "Set", "AbstractSet", "MutableSet"}


def is_set(node: ast.expr, sets: set[str]) -> bool:
    """Whether an expression is, as far as one can see here, a set."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        return _called(node) in SET_MAKERS | SET_METHODS
    if isinstance(node, ast.BinOp) and isinstance(node.op, SET_OPERATORS):
        return is_set(node.left, sets) or is_set(node.right, sets)
    if isinstance(node, ast.IfExp):
        return is_set(node.body, sets) or is_set(node.orelse, sets)
    return _dotted(node) in sets


def _dotted(node: ast.expr) -> str:
    """`lost` of a name, `.lost` of an attribute of whatever."""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else _name(node)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.Call) -> str:
    return _name(node.func)
