"""Variables that a script's loop carries from step to step: a rate that it divides, a hidden state, the best value so far.

No checkpoint holds them, so a resumed run begins with their first values. The source of the loop shows them: names that
exist before it, that its body reads before it sets them, and that decide more than what is printed.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Iterable, Mapping
from types import FrameType, FunctionType
from typing import Any

_REPORTS = {
    *(
        "print",
        "log",
        "info",
        "debug",
        "warning",
        "write",
        "append",
        "format",
        "flush",
        "add_scalar",
    ),
    *("add_scalars", "set_postfix", "set_postfix_str", "set_description", "item", "tolist"),
    *(
        "float",
        "int",
        "str",
        "bool",
        "max",
        "min",
        "abs",
        "round",
        "len",
        "sum",
        "exp",
        "sqrt",
        "time",
    ),
    *("perf_counter", "monotonic", "detach", "cpu"),
}
"""Calls that only compute or report: what goes into them decides nothing."""
_MAX_ITEMS = 32
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def numbers_around(loss: Any) -> dict[str, tuple[float, ...]]:
    """Return the numbers in the variables around a loss function, alone or in a list or dict, by name.

    >>> average = 1.0
    >>> def loss(batch):
    ...     return batch / average
    >>> numbers_around(loss)["average"]
    (1.0,)
    """
    function = getattr(loss, "__func__", loss)
    if not isinstance(function, FunctionType):
        return {}
    code = function.__code__
    around = {
        name: function.__globals__[name] for name in code.co_names if name in function.__globals__
    }
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            around[name] = cell.cell_contents
    found = {}
    for name, value in around.items():
        held = list(value.values()) if isinstance(value, dict) else value
        held = held[:_MAX_ITEMS] if isinstance(held, list) else [held]
        numbers = tuple(float(each) for each in held if type(each) in {int, float})
        if numbers:
            found[name] = numbers
    return found


def carried_variables(frame: FrameType) -> list[str]:
    """Return the names that the loop over `run.steps` in this frame carries, and that decide something."""
    tree = _source_of(frame)
    loop = _loop_at(tree, frame.f_lineno) if tree is not None else None
    if tree is None or loop is None:
        return []
    reader = _Reader({each.name: each for each in ast.walk(tree) if isinstance(each, _Function)})
    reader.body(
        loop.body, {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    )
    values: Mapping[str, Any] = {**frame.f_globals, **frame.f_locals}
    found = reader.read_first & reader.set_names & values.keys()
    return sorted(found & reader.deciding())


def _source_of(frame: FrameType) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):  # not the text that runs: edited since
        return None


def _loop_at(tree: ast.Module, line: int) -> ast.For | None:
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.For)]
    found = [each for each in loops if each.iter.lineno <= line <= (each.iter.end_lineno or line)]
    return found[-1] if found else None


class _Reader:
    """Reads statements in the order in which they run."""

    def __init__(self, functions: Mapping[str, _Function]) -> None:
        self._functions = functions
        self._entered: set[str] = set()
        self._outer: list[set[str]] = []
        """Of the functions that are being read: the names they set outside of themselves."""
        self.read_first: set[str] = set()
        self.set_names: set[str] = set()
        self._effects: set[str] = set()
        self._flows: list[tuple[set[str], set[str]]] = []
        """What is read, and which names depend on it."""

    def deciding(self) -> set[str]:
        """Return the names that decide something, also by way of other names."""
        found = set(self._effects)
        while True:
            more = {name for read, to in self._flows if to & found for name in read - to} - found
            if not more:
                return found
            found |= more

    def body(self, statements: Iterable[ast.stmt], known: set[str]) -> set[str]:
        """Read statements; `known` are the names set before, in this step. Return those set after."""
        known = set(known)
        for each in statements:
            known = self._statement(each, known)
        return known

    def _statement(self, node: ast.stmt, known: set[str]) -> set[str]:
        if isinstance(node, ast.If | ast.While):
            self._read(node.test, known)
            names = _loads(node.test)
            if _acts([*node.body, *node.orelse]):
                self._effects |= names
            self._flows.append((names, _stores([*node.body, *node.orelse])))
            after = [self.body(node.body, known), self.body(node.orelse, known)]
            return known | (after[0] & after[1]) if isinstance(node, ast.If) else known
        if isinstance(node, ast.For):
            self._read(node.iter, known)
            self._flows.append((_loads(node.iter), _stores(node.body)))
            inside = known | _stores([node.target])
            self.body(node.body, inside)
            self.body(node.orelse, known)
            return known
        if isinstance(node, ast.With):
            for item in node.items:
                self._read(item.context_expr, known)
            return self.body(node.body, known)
        if isinstance(node, ast.Try):
            self.body(node.body, known)
            for handler in node.handlers:
                self.body(handler.body, known)
            self.body([*node.orelse, *node.finalbody], known)
            return known
        if isinstance(node, _Function):
            self._functions = {**self._functions, node.name: node}
            return known | {node.name}
        return self._simple(node, known)

    def _simple(self, node: ast.stmt, known: set[str]) -> set[str]:
        targets = _stores([node])
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._note_read(node.target.id, known)
        self._read(node, known)
        names = _loads(node)
        if isinstance(node, ast.Return) or _acts([node]):
            self._effects |= names
        self._flows.append((names, targets))
        if self._outer:
            targets &= self._outer[-1]
        self.set_names |= targets
        return known | targets

    def _read(self, node: ast.AST, known: set[str]) -> None:
        for name in sorted(_loads(node)):
            self._note_read(name, known)
            function = self._functions.get(name)
            if function is not None and name not in self._entered:
                self._entered.add(name)
                outer = {
                    each
                    for inner in ast.walk(function)
                    if isinstance(inner, ast.Global | ast.Nonlocal)
                    for each in inner.names
                }
                self._outer.append(outer)
                self.body(function.body, known)
                self._outer.pop()

    def _note_read(self, name: str, known: set[str]) -> None:
        if name not in known and (not self._outer or name in self._outer[-1]):
            self.read_first.add(name)


def _loads(node: ast.AST) -> set[str]:
    """Return the names that an expression reads, those of lambdas among them."""
    return {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def _stores(nodes: Iterable[ast.AST]) -> set[str]:
    return {
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _acts(nodes: Iterable[ast.stmt]) -> bool:
    """Return whether statements do more than set names, compute and report."""
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Break | ast.Continue | ast.Return | ast.Raise):
                return True
            if isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
                return True
            if isinstance(each, ast.Call) and _name_of(each.func) not in _REPORTS:
                return True
    return False


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
