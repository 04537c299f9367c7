"""Refusals of dumps and restores in the sources of the package, and which functions a function reaches."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import slurm_affinode
from slurm_affinode.model.suspension import RefusalCode

PACKAGE = Path(slurm_affinode.__file__).parent
_PREFIX = "slurm_affinode."
_FOLDERS = ("checkpoint", "suspension")
_GATES = ("dump", "restore", "memory", "suspend", "job.streams", "job.process_tree")
"""Modules of ``suspension`` that take part in a dump or restore."""
_NO_GATES = ("cuda.features",)
"""Modules of ``checkpoint`` whose refusals are those of the driver."""
DUMP = (
    "DumpFailed", "DumpNoRoom", "NotRestored", "AbortedError", "InUseError", "NotStoppedError", "StreamsError",
    "_failed",
)  # fmt: skip
RESTORE = ("RestoreFailed", "RestoreInterrupted", "restore_failure")
_MADE = {*DUMP, *RESTORE, "kind"}
"""Names that are called to make a refusal; ``kind`` holds one of the others."""
_RETURNED = ("refusal", "excess")
"""Functions of ``checkpoint`` that return a refusal."""


@dataclass(frozen=True, slots=True)
class RefusalSite:
    """A place where a dump or restore is refused."""

    module: str
    """``checkpoint.criu.criu``."""
    by: str
    """The error, or ``return``."""
    text: str
    """The message; ``{}``: a value."""
    function: str
    """The function there: ``checkpoint.criu.criu:Criu.dump``."""


def sites() -> Iterator[RefusalSite]:
    """Yield every refusal of ``checkpoint`` and of the steps of a suspension."""
    for module, tree in _modules().items():
        folder, _, name = module.partition(".")
        if (folder == "checkpoint" and name not in _NO_GATES) or name in _GATES:
            for function, node in _functions(module, tree):
                for by, text in _refusals(node, returned=folder == "checkpoint" and node.name in _RETURNED):
                    yield RefusalSite(module, by, text, function)


def _refusals(function: ast.FunctionDef, *, returned: bool) -> Iterator[tuple[str, str]]:
    for node in _own_nodes(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _MADE and node.args:
            yield node.func.id, _text(node.args[-1] if node.func.id == "_failed" else node.args[0])
        if returned and isinstance(node, ast.Return) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            text = _text(node.value)
            if text != "{}":
                yield "return", text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    return "{}"


@cache
def _modules() -> dict[str, ast.Module]:
    result = {}
    for folder in _FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            result[name] = ast.parse(path.read_text(encoding="utf-8"))
    return result


def _functions(module: str, tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield f"{module}:{node.name}", node
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    yield f"{module}:{node.name}.{item.name}", item


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    for statement in function.body:
        yield from ast.walk(statement)


@cache
def functions() -> dict[str, ast.FunctionDef]:
    """Return every function and method of the folders: ``checkpoint.criu.criu:Criu.dump`` -> its source."""
    return {name: node for module, tree in _modules().items() for name, node in _functions(module, tree)}


@cache
def _imports(module: str) -> dict[str, str]:
    """Return the names that a module has from others: name -> module, or ``module:name``."""
    result = {}
    for node in ast.walk(_modules()[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PREFIX):
            origin = (node.module or "").removeprefix(_PREFIX)
            for name in node.names:
                inner = f"{origin}.{name.name}"
                result[name.asname or name.name] = inner if inner in _modules() else f"{origin}:{name.name}"
    return result


@cache
def _methods() -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name in functions():
        _, _, inner = name.partition(":")
        if "." in inner:
            result.setdefault(inner.partition(".")[2], []).append(name)
    return result


@cache
def _references(name: str) -> frozenset[str]:
    return frozenset(_referred(name))


def _referred(name: str) -> Iterator[str]:
    """Yield the functions that a function refers to; a method of an unknown object is each one of that name that the
    module may know.
    """
    module, _, inner = name.partition(":")
    class_name, imported = inner.partition(".")[0], _imports(module)
    known = {module, *(target.partition(":")[0] for target in imported.values())}
    for node in _own_nodes(functions()[name]):
        if isinstance(node, ast.Name):
            yield from (f"{module}:{node.id}", imported.get(node.id, ""))
        if isinstance(node, ast.Attribute):
            holder = node.value.id if isinstance(node.value, ast.Name) else ""
            if holder == "self" and f"{module}:{class_name}.{node.attr}" in functions():
                yield f"{module}:{class_name}.{node.attr}"
            elif imported.get(holder, "") in _modules():
                yield f"{imported[holder]}:{node.attr}"
            else:
                yield from (method for method in _methods().get(node.attr, ()) if method.partition(":")[0] in known)


@cache
def reached(roots: tuple[str, ...]) -> set[str]:
    """Return the functions that these reach, with themselves. Raises ``KeyError`` if one of them does not exist."""
    result: set[str] = set()
    todo = list(roots)
    for root in todo:
        functions()[root]
    while todo:
        name = todo.pop()
        if name not in result and name in functions():
            result.add(name)
            todo += _references(name)
    return result


def refusal_codes(names: Iterable[str]) -> set[str]:
    """Return the codes of the refusals that these functions make."""
    result: set[str] = set()
    for name in names:
        for node in _own_nodes(functions()[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Refusal", "refuse"):
                result |= {
                    RefusalCode[argument.attr].value
                    for argument in node.args[:1]
                    if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "RefusalCode"
                }
    return result
