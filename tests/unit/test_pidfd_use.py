"""Only ``pidfd`` resolves process IDs; checked in the source of every module.

A process ID used twice may refer to two processes. So no other module signals by process ID, opens files below
``/proc/PID``, or runs a program that does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "slurm_affinode"
OWNER = "base.pidfd"

# (module, rule): reason.
EXCEPTIONS = {
    # The group of a child that has not been waited for; its ID cannot be reused yet.
    ("base.process", "os.killpg"): "a group has no descriptor",
    # By descriptors of namespaces: those that CRIU enters, and those in which sockets are queried.
    ("checkpoint.criu_launcher", "setns"): "enters the namespaces of a shepherd, given as descriptors",
    ("checkpoint.user_files", "setns"): "a thread of its own enters a mount namespace that is held",
    ("suspension.inplace.sock_diag", "setns"): "a thread of its own enters a network namespace that is held",
    # A thread has no descriptor, either; it is detached if it is not a thread of the held process.
    ("suspension.process_tree", "ptrace"): "what it traced is looked at after that",
}
FORBIDDEN = {
    "os.kill", "os.killpg", "os.pidfd_open", "signal.pidfd_send_signal", "os.setns", "os.getpgid", "os.getsid",
    "os.setpgid", "os.setpriority", "os.getpriority",
}  # fmt: skip
"""Functions that take a process ID, or a descriptor that only ``pidfd`` has."""
ZERO_ONLY = {
    "os.sched_setaffinity", "os.sched_setscheduler", "os.sched_setparam", "resource.prlimit",
}  # fmt: skip
"""Functions whose first argument is a process ID; only 0, the calling process, is allowed."""
_LAST = {name.partition(".")[2] for name in FORBIDDEN | ZERO_ONLY}
SYSTEM_CALLS = {"setns", "ptrace", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "process_vm_readv", "tgkill"}
"""Functions of the C library, independent of its variable name."""
NUMBERS = {"_SYS_PIDFD_GETFD": "pidfd_getfd", "_SYS_PIDFD_OPEN": "pidfd_open"}
ROOTS = {"PROC", "proc", "_proc"}
"""Names of variables for ``/proc``."""
_BY_NUMBER = re.compile(r"/proc/([0-9]|%|\{|$)")


def is_root(node: ast.AST) -> bool:
    """Return whether an expression is ``/proc``, or a directory in its place."""
    if isinstance(node, ast.Name):
        return node.id in ROOTS
    if isinstance(node, ast.Attribute):
        return node.attr in ROOTS
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.rstrip("/") == "/proc"
    return isinstance(node, ast.Call) and last(node.func) == "Path" and any(map(is_root, node.args[:1]))


def last(node: ast.expr) -> str:
    """Return the last name of ``a.b.name``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def is_fixed(node: ast.AST) -> bool:
    """Return whether this is a fixed name other than that of a process: ``self``, ``meminfo``, ``sys``."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value[:1].isdigit()


def violations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and rule of each use of a process ID."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{one.name}" for one in node.names}
            yield from ((node.lineno, name) for name in sorted(names & (FORBIDDEN | ZERO_ONLY)))
        elif isinstance(node, ast.Attribute):
            if node.attr in _LAST and ast.unparse(node) in FORBIDDEN:
                yield node.lineno, ast.unparse(node)
            elif node.attr in SYSTEM_CALLS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and node.id in NUMBERS:
            yield node.lineno, NUMBERS[node.id]
        elif isinstance(node, ast.Call) and last(node.func) in _LAST and called(node) in ZERO_ONLY:
            if not node.args or not isinstance(node.args[0], ast.Constant) or node.args[0].value != 0:
                yield node.lineno, called(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, rule) for rule in of_text(node, parents))
        if is_root(node) and isinstance(node, ast.expr) and not may_have_root(node, parents[node]):
            yield node.lineno, "a path below /proc"


def of_text(node: ast.Constant, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    parent = parents[node]
    if isinstance(parent, ast.Expr):  # documentation
        return
    text = str(node.value)
    if text in SYSTEM_CALLS:
        yield text
    if re.search(r"\bnsenter\b", text):
        yield "nsenter"
    found = _BY_NUMBER.search(text)
    # A text that ends with "/proc/" does not use a process ID if nothing is appended.
    if found is not None and (found[1] or isinstance(parent, ast.JoinedStr | ast.BinOp)):
        yield "a path below /proc"


def may_have_root(node: ast.expr, parent: ast.AST) -> bool:
    """Return whether a root is passed on, assigned to a known name, or extended by a fixed name."""
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.Div) and parent.left is node and is_fixed(parent.right)
    if isinstance(parent, ast.Assign):
        return all(is_root(target) for target in parent.targets)
    if isinstance(parent, ast.Call):
        return is_root(parent) or (
            parent.func is not node
            and not re.search(r"(^|\.)(str|listdir|scandir|walk|join|open|fspath|PurePath)$", called(parent))
        )
    # Also fields of dataclasses, arguments, their defaults, and comparisons.
    return isinstance(
        parent, ast.keyword | ast.arguments | ast.AnnAssign | ast.Compare | ast.Attribute | ast.Tuple
    ) and not (isinstance(parent, ast.Attribute) and parent.attr not in ROOTS)


def modules() -> dict[str, ast.Module]:
    found = {}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        name = ".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return found


@cache
def all_violations() -> list[tuple[str, int, str]]:
    found = sorted(modules().items())
    return [(name, *one) for name, tree in found if name != OWNER for one in sorted(set(violations(tree)))]


def test_no_module_uses_a_process_by_its_pid() -> None:
    """Each line of the failure is a place to change: hold the process (``pidfd.Process``) and use that."""
    wrong = [
        f"{name.replace('.', '/')}.py:{line}: {rule}"
        for name, line, rule in all_violations()
        if (name, rule) not in EXCEPTIONS
    ]
    assert wrong == []


def test_every_exception_is_used() -> None:
    """Every exception is used."""
    there = {(name, rule) for name, _, rule in all_violations()}
    assert set(EXCEPTIONS) - there == set()


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("os.kill(pid, 9)", "os.kill"),
        ("from os import kill", "os.kill"),
        ("call = os.killpg", "os.killpg"),
        ("signal.pidfd_send_signal(fd, 9)", "signal.pidfd_send_signal"),
        ("os.pidfd_open(pid)", "os.pidfd_open"),
        ("libc.setns(fd, 0)", "setns"),
        ("_call('setns', fd, 0)", "setns"),
        ("libc.syscall(_SYS_PIDFD_GETFD, fd, 1, 0)", "pidfd_getfd"),
        ("libc.ptrace(0x4206, task, None, None)", "ptrace"),
        ("os.sched_setaffinity(pid, cpus)", "os.sched_setaffinity"),
        ("run(['nsenter', '--target=1'])", "nsenter"),
        ("run(f'nsenter --target={pid}')", "nsenter"),
        ("open(f'/proc/{pid}/maps')", "a path below /proc"),
        ("open('/proc/%d/maps' % pid)", "a path below /proc"),
        ("open('/proc/{}/maps'.format(pid))", "a path below /proc"),
        ("open('/proc/' + str(pid))", "a path below /proc"),
        ("open('/proc/1/maps')", "a path below /proc"),
        ("PROC / str(pid)", "a path below /proc"),
        ("self._proc / name / 'status'", "a path below /proc"),
        ("Path('/proc') / str(pid)", "a path below /proc"),
        ("Path('/proc', str(pid))", "a path below /proc"),
        ("proc.joinpath(name)", "a path below /proc"),
        ("proc.iterdir()", "a path below /proc"),
        ("f'{proc}/{pid}'", "a path below /proc"),
        ("os.path.join('/proc', name)", "a path below /proc"),
        ("os.listdir(proc)", "a path below /proc"),
        ("base = self.proc", "a path below /proc"),
        ("pinned.PROC / str(pid)", "a path below /proc"),
    ],
)
def test_use_by_pid_is_found(source: str, rule: str) -> None:
    """It is found in each form that this project has used, and in some others."""
    assert rule in {found for _, found in violations(ast.parse(source))}


@pytest.mark.parametrize(
    "source",
    [
        '"""As ``/proc/{pid}`` and ``nsenter``."""',
        "os.sched_setaffinity(0, cpus)",
        "open(f'/proc/self/fd/{fd}')",
        "open('/proc/meminfo')",
        "text(proc / 'meminfo')",
        "(proc / 'self' / 'ns' / kind).stat()",
        "Process(pid, proc=self._proc)",
        "pids(proc)",
        "self._proc = proc",
        "def look(proc: Path = PROC) -> None: pass",
        "class A:\n    proc: Path = PROC",
        "process.kill()",
    ],
)
def test_use_of_fixed_paths_or_held_processes_is_allowed(source: str) -> None:
    assert set(violations(ast.parse(source))) == set()
