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
    ("checkpoint.criu.launcher", "setns"): "enters the namespaces of a shepherd, given as descriptors",
    ("checkpoint.user_files", "setns"): "a thread of its own enters a mount namespace that is held",
    ("suspension.inplace.sock_diag", "setns"): "a thread of its own enters a network namespace that is held",
    # A thread has no descriptor, either; it is detached if it is not a thread of the held process.
    ("base.ptrace", "ptrace"): "the callers below",
    ("suspension.job.process_tree", "ptrace"): "the traced process is checked afterwards",
    ("checkpoint.criu.kernel_states", "ptrace"): "the caller traces the process, so its number stays its own",
    (
        "checkpoint.criu.cpu_affinity",
        "os.sched_setaffinity",
    ): "CRIU holds the thread, found alive after that",
    ("checkpoint.criu.criu", "os.sched_getaffinity"): "the process is found alive after that",
    ("checkpoint.image.page_filler", "os.sched_getaffinity"): "the CPUs of another process would only be slower",
}
FORBIDDEN = {
    "os.kill", "os.killpg", "os.pidfd_open", "signal.pidfd_send_signal", "os.setns", "os.getpgid", "os.getsid",
    "os.setpgid", "os.setpriority", "os.getpriority", "fcntl.F_SETOWN", "fcntl.F_SETOWN_EX",
    # Programs that are not run by ``base.process``.
    "os.system", "os.popen", "os.posix_spawn", "os.posix_spawnp", "os.spawnv", "os.spawnl", "os.spawnvp", "os.spawnlp",
}  # fmt: skip
"""Functions that take a process ID, or a descriptor that only ``pidfd`` has."""
ZERO_ONLY = {
    "os.sched_setaffinity", "os.sched_getaffinity", "os.sched_setscheduler", "os.sched_getscheduler",
    "os.sched_setparam", "os.sched_getparam", "os.sched_rr_get_interval", "resource.prlimit",
}  # fmt: skip
"""Functions whose first argument is a process ID; only 0, the calling process, is allowed."""
_LAST = {name.partition(".")[2] for name in FORBIDDEN | ZERO_ONLY}
_MODULES = {name.partition(".")[0] for name in FORBIDDEN | ZERO_ONLY}
OTHER_MODULES = {"posix", "psutil"}
"""Modules with the same functions under other names."""
SYSTEM_CALLS = {
    "setns", "ptrace", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "process_vm_readv", "process_vm_writev",
    "process_madvise", "tgkill", "tkill", "sigqueue", "kcmp",
}  # fmt: skip
"""Functions of the C library, independent of its variable name."""
OF_LIBC = {"kill", "killpg", "prlimit", "sched_setaffinity", "sched_setscheduler", "setpriority", "getpgid", "setpgid"}
"""Further ones, whose names methods of other objects have as well."""
_NUMBER = re.compile(r"_?(?:SYS|NR)_+(PIDFD_\w+|T?KILL|TGKILL|PTRACE|PROCESS_\w+|KCMP|SETNS|PRLIMIT64)", re.IGNORECASE)
PROGRAMS = {
    "chrt", "fuser", "gcore", "gdb", "ionice", "kill", "killall", "nsenter", "pgrep", "pidof", "pkill", "prlimit",
    "renice", "skill", "strace", "taskset", "bash", "sh",
}  # fmt: skip
"""Programs that take a process ID, find processes by their names, or run such programs."""
ROOTS = {"PROC", "proc", "_proc"}
"""Names of variables for ``/proc``."""
_BY_NUMBER = re.compile(r"/proc/(?:self/+)?([0-9]|\.\.|[%{<*?\[$]|$)")


def is_root(node: ast.AST) -> bool:
    """Return whether an expression is ``/proc``, or a directory in its place."""
    if isinstance(node, ast.Name):
        return node.id in ROOTS
    if isinstance(node, ast.Attribute):
        return node.attr in ROOTS
    if isinstance(node, ast.Constant):
        return text_of(node).rstrip("/") == "/proc"
    if isinstance(node, ast.BinOp):
        return isinstance(node.right, ast.Constant) and text_of(node.right).strip("/") == "proc"
    return isinstance(node, ast.Call) and last(node.func) == "Path" and any(map(is_root, node.args[:1]))


def text_of(node: ast.Constant) -> str:
    """Return the text of a constant; bytes as text, others as an empty one."""
    value = node.value
    return value if isinstance(value, str) else value.decode("latin-1") if isinstance(value, bytes) else ""


def last(node: ast.expr) -> str:
    """Return the last name of ``a.b.name``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_fixed(node: ast.AST) -> bool:
    """Return whether this is a fixed name other than that of a process: ``self``, ``meminfo``, ``sys``."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value[:1].isdigit()


class Source:
    """The source of a module: its uses of process IDs, each with its line and rule."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._modules = {name: name for name in _MODULES} | {
            name.asname: name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
            if name.asname
        }  # fmt: skip
        self._libraries = {
            ast.unparse(target)
            for node in ast.walk(tree) if isinstance(node, ast.Assign) and is_library(node.value)
            for target in node.targets
        }  # fmt: skip

    def violations(self) -> Iterator[tuple[int, str]]:
        """Yield line and rule of each use of a process ID."""
        for node in ast.walk(self._tree):
            line = getattr(node, "lineno", 0)
            yield from ((line, rule) for rule in self._rules(node))

    def _rules(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in OTHER_MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from self._imported(node)
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node)
        elif isinstance(node, ast.Name) and (match := _NUMBER.fullmatch(node.id)) is not None:
            yield match[1].lower()
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1 and isinstance(node.elts[0], ast.Constant):
            program = text_of(node.elts[0]).rpartition("/")[2]
            if program in PROGRAMS:
                yield program
        elif isinstance(node, ast.arguments):
            yield from self._defaults(node)
        if isinstance(node, ast.expr) and is_root(node) and not self._may_have_root(node):
            yield "a path below /proc"

    def _imported(self, node: ast.ImportFrom) -> Iterator[str]:
        if node.module in OTHER_MODULES:
            yield str(node.module)
        for item in node.names:
            name = f"{node.module}.{item.name}"
            if name in FORBIDDEN | ZERO_ONLY or (node.module in _MODULES and item.name == "*"):
                yield name
            if item.name in ROOTS and item.asname not in (None, *ROOTS):
                yield "a path below /proc"

    def _named(self, node: ast.expr) -> str:
        """Return an expression as text, with the proper name of a module that was imported under another one."""
        text = ast.unparse(node)
        first, dot, rest = text.partition(".")
        return self._modules.get(first, first) + dot + rest

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        name = self._named(node)
        if name in FORBIDDEN or (node.attr == "__dict__" and self._named(node.value) in _MODULES):
            yield name
        elif node.attr in SYSTEM_CALLS:
            yield node.attr
        elif node.attr in OF_LIBC and (ast.unparse(node.value) in self._libraries or is_library(node.value)):
            yield f"libc.{node.attr}"

    def _call(self, node: ast.Call) -> Iterator[str]:
        name, arguments = self._named(node.func), node.args
        if name in ZERO_ONLY and not (arguments and isinstance(arguments[0], ast.Constant) and arguments[0].value == 0):
            yield name
        if last(node.func) == "syscall" and arguments and isinstance(arguments[0], ast.Constant):
            yield "a system call by its number"
        if name == "vars" and arguments and self._named(arguments[0]) in _MODULES:
            yield "vars"
        texts = {text_of(argument) for argument in arguments if isinstance(argument, ast.Constant)}
        if name in ("getattr", "operator.attrgetter", "operator.methodcaller", "attrgetter", "methodcaller"):
            yield from texts & _LAST
            if arguments and self._named(arguments[0]) in _MODULES and not isinstance(arguments[-1], ast.Constant):
                yield "getattr"
        if name in ("__import__", "importlib.import_module", "import_module"):
            yield from texts & (_MODULES | OTHER_MODULES)

    def _constant(self, node: ast.Constant) -> Iterator[str]:
        parent, text = self._parents[node], text_of(node)
        if isinstance(parent, ast.Expr):  # documentation
            return
        if text in SYSTEM_CALLS:
            yield text
        if re.search(r"\bnsenter\b", text):
            yield "nsenter"
        match = _BY_NUMBER.search(text)
        # A text that ends with "/proc/" does not use a process ID if nothing is appended.
        if match is not None and (match[1] or isinstance(parent, ast.JoinedStr | ast.BinOp)):
            yield "a path below /proc"

    def _defaults(self, node: ast.arguments) -> Iterator[str]:
        """Check that the default of an argument is ``/proc`` only if its name tells."""
        of_names = [*node.posonlyargs, *node.args]
        of_names = of_names[len(of_names) - len(node.defaults) :]
        for item, default in (
            *zip(of_names, node.defaults, strict=True),
            *zip(node.kwonlyargs, node.kw_defaults, strict=True),
        ):
            if default is not None and is_root(default) and item.arg not in ROOTS:
                yield "a path below /proc"

    def _may_have_root(self, node: ast.expr) -> bool:
        """Return whether a root is passed on, assigned to a known name, or extended by a fixed name."""
        parent = self._parents[node]
        if isinstance(parent, ast.BinOp):
            return isinstance(parent.op, ast.Div) and parent.left is node and is_fixed(parent.right)
        if isinstance(parent, ast.Assign):
            return all(is_root(target) for target in parent.targets)
        if isinstance(parent, ast.AnnAssign):
            return is_root(parent.target)
        if isinstance(parent, ast.Tuple):
            return not isinstance(self._parents[parent], ast.Call)
        if isinstance(parent, ast.Call):
            return is_root(parent) or (
                parent.func is not node
                and not re.search(
                    r"(^|\.)(str|listdir|scandir|walk|join|open|fspath|PurePath|glob|iglob)$", ast.unparse(parent.func)
                )
            )
        if isinstance(parent, ast.Attribute):
            return parent.attr in ROOTS
        return isinstance(parent, ast.keyword | ast.arguments | ast.Compare)


def is_library(node: ast.expr) -> bool:
    """Return whether an expression is the C library."""
    if isinstance(node, ast.Call):
        return last(node.func) in ("CDLL", "PyDLL", "LoadLibrary")
    return last(node).lower().strip("_") == "libc"


def violations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and rule of each use of a process ID."""
    yield from Source(tree).violations()


def modules() -> dict[str, ast.Module]:
    result = {}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        name = ".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        result[name.removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return result


@cache
def all_violations() -> list[tuple[str, int, str]]:
    result = sorted(modules().items())
    return [(name, *violation) for name, tree in result if name != OWNER for violation in sorted(set(violations(tree)))]


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
    used = {(name, rule) for name, _, rule in all_violations()}
    assert set(EXCEPTIONS) - used == set()


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
        ("import os as system\nsystem.kill(pid, 9)", "os.kill"),
        ("from os import kill as end", "os.kill"),
        ("from os import *", "os.*"),
        ("getattr(os, 'kill')(pid, 9)", "kill"),
        ("getattr(os, name)(pid, 9)", "getattr"),
        ("operator.attrgetter('pidfd_open')(os)(pid)", "pidfd_open"),
        ("vars(os)['kill'](pid, 9)", "vars"),
        ("os.__dict__['kill'](pid, 9)", "os.__dict__"),
        ("importlib.import_module('os').kill(pid, 9)", "os"),
        ("__import__('psutil').Process(pid).kill()", "psutil"),
        ("import psutil", "psutil"),
        ("from psutil import Process", "psutil"),
        ("import posix", "posix"),
        ("functools.partial(os.kill, pid)", "os.kill"),
        ("os.system(f'kill {pid}')", "os.system"),
        ("os.posix_spawn('/bin/kill', ['kill', str(pid)], {})", "kill"),
        ("run(['kill', '-9', str(pid)])", "kill"),
        ("run(('/usr/bin/pkill', '-f', name))", "pkill"),
        ("run(['taskset', '-p', str(pid)])", "taskset"),
        ("run(['sh', '-c', f'kill {pid}'])", "sh"),
        ("fcntl.fcntl(fd, fcntl.F_SETOWN, pid)", "fcntl.F_SETOWN"),
        ("os.sched_getaffinity(pid)", "os.sched_getaffinity"),
        ("libc.kill(pid, 9)", "libc.kill"),
        ("ctypes.CDLL(None).kill(pid, 9)", "libc.kill"),
        ("calls = ctypes.CDLL(None)\ncalls.kill(pid, 9)", "libc.kill"),
        ("libc.process_vm_writev(pid, a, 1, b, 1, 0)", "process_vm_writev"),
        ("libc.syscall(62, pid, 9)", "a system call by its number"),
        ("libc.syscall(SYS_kill, pid, 9)", "kill"),
        ("'/'.join(('/proc', str(pid), 'maps'))", "a path below /proc"),
        ("Path('/') / 'proc' / str(pid)", "a path below /proc"),
        ("open(b'/proc/%d/maps' % pid)", "a path below /proc"),
        ("b'/proc/' + str(pid).encode()", "a path below /proc"),
        ("open('/proc/<pid>/maps'.replace('<pid>', str(pid)))", "a path below /proc"),
        ("open(f'/proc/self/../{pid}/maps')", "a path below /proc"),
        ("glob.glob('/proc/*/maps')", "a path below /proc"),
        ("glob.glob('/proc/[0-9]*/maps')", "a path below /proc"),
        ("from slurm_affinode.base.pidfd import PROC as BASE", "a path below /proc"),
        ("def look(pid, base=PROC): return base / str(pid)", "a path below /proc"),
        ("base: Path = PROC", "a path below /proc"),
    ],
)
def test_use_by_pid_is_found(source: str, rule: str) -> None:
    """It is found in each form that this project has used, and in others: aliases, programs, the C library."""
    assert rule in {result for _, result in violations(ast.parse(source))}


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
        "os.sched_getaffinity(0)",
        "open(f'/proc/self/task/{thread}/comm')",
        "libc.syscall(_SYS_OPENAT2, fd, path, how, size)",
        "stages = ('warn', 'kill')",
        "getattr(rule, 'dirty', None)",
        "import os as system\nsystem.getpid()",
        "def look(*, proc: Path = PROC) -> None: pass",
        "re.compile(r'/proc/\\d+(/|$)')",
    ],
)
def test_use_of_fixed_paths_or_held_processes_is_allowed(source: str) -> None:
    assert set(violations(ast.parse(source))) == set()
