"""The page on the agent lists each queue, thread and lock of the modules that the daemon imports, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "slurm_affinode"
SECTION = (
    (REPOSITORY / "docs" / "agent.md")
    .read_text(encoding="utf-8")
    .partition("\n## Threads and locks\n")[2]
    .partition("\n## ")[0]
)
ROOTS = ("agent.daemon", "agent.composition")
LOCKS = {"threading.Lock", "threading.RLock", "threading.Condition", "threading.Semaphore"}
THREADS = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix", "AcceptLoop": 1}
"""Calls that start threads -> the argument with their name."""
THREADS |= dict.fromkeys(("pool", "Repeated", "in_own_thread"), 0)
MAKERS = {"base.threads", "agent.listeners"}
"""Modules with these functions: the names are those that others pass."""


def file_of(module: str) -> Path:
    return REPOSITORY / PACKAGE / (module.replace(".", "/") + ".py")


@cache
def modules() -> dict[str, ast.Module]:
    """Return the modules that the daemon imports, also in functions."""
    result: dict[str, ast.Module] = {}
    left = list(ROOTS)
    while left:
        name = left.pop()
        if name in result or not file_of(name).is_file():
            continue
        result[name] = tree = ast.parse(file_of(name).read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                place = (node.module or "").removeprefix(PACKAGE).lstrip(".")
                left += [place, *(f"{place}.{item.name}".lstrip(".") for item in node.names)]
    return result


def table(heading: str) -> list[list[str]]:
    """Return the cells of a table of the section, without its head."""
    lines = SECTION.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def text_of(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def argument(call: ast.Call, which: str | int) -> ast.expr | None:
    if isinstance(which, int):
        return call.args[which] if which < len(call.args) else None
    return next((item.value for item in call.keywords if item.arg == which), None)


def queues() -> Iterator[tuple[str, bool]]:
    """Yield the name of each queue, and whether the agent waits for its calls."""
    for name, tree in modules().items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and re.search(r"\bworkers\.queue$", ast.unparse(call.func)):
                last = any(item.arg == "last" for item in call.keywords)
                if text := text_of(argument(call, 0)):
                    yield text, last
                else:  # one call for several: their names are in the same module
                    assert name == "agent.control"
                    texts = (text_of(node) for node in ast.walk(tree) if isinstance(node, ast.Constant))
                    yield from ((text, last) for text in texts if text and re.fullmatch(r"control( of [a-z ]+)?", text))


def threads() -> Iterator[str]:
    """Yield the names of all other threads."""
    for name, tree in modules().items():
        for call in ast.walk(tree):
            function = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
            if isinstance(call, ast.Call) and function in THREADS and (call.args or call.keywords):
                if (text := text_of(argument(call, THREADS[function]))) is not None:
                    yield text
                else:
                    assert name in MAKERS, f"{name}, line {call.lineno}: a thread without a name"


def locks() -> Iterator[str]:
    """Yield ``module.Class`` or ``module`` for each lock."""
    for name, tree in modules().items():
        for part in tree.body:
            place = f"{name}.{part.name}" if isinstance(part, ast.ClassDef) else name
            if any(isinstance(node, ast.Attribute) and ast.unparse(node) in LOCKS for node in ast.walk(part)):
                yield place


def test_the_daemon_is_found() -> None:
    assert {"suspension.suspend", "checkpoint.criu.criu", "base.pidfd"} <= modules().keys()


def test_queues_are_listed() -> None:
    """A queue with ``*`` is one that the agent waits for when it stops."""
    listed = [match for row in table("queue") for match in re.findall(r"`([^`]+)`(\*?)", row[0])]
    assert sorted((name, bool(star)) for name, star in listed) == sorted(set(queues()))


def test_threads_are_listed() -> None:
    listed = {match for row in table("other thread") for match in re.findall(r"`([^`]+)`", row[0])}
    listed |= set(re.findall(r"one thread \(`([^`]+)`\)", SECTION))
    assert sorted(listed) == sorted(set(threads()))


def test_locks_are_listed() -> None:
    """Each row names the objects with a lock, or a module for all of its objects."""
    listed: list[str] = []
    for row in table("object"):
        for name in re.findall(r"`([^`]+)`", row[0]):
            listed.append(name if "." in name else f"{listed[-1].rpartition('.')[0]}.{name}")
    result = {place if place in listed else place.rpartition(".")[0] for place in locks()}
    assert sorted(listed) == sorted(result)
