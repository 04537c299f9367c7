"""Root acts for a job with the rights in its own records; checked in the source of every module.

A user exchanges the processes of a job at will, for example for a setuid program that waits: IDs and paths of processes
are compared with the records, and never become a right or a path of root.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "slurm_affinode"
PACKAGES = ("checkpoint", "suspension", "agent", "zombies")

# (module, function): the record that the IDs are from.
OWNERS = {
    ("checkpoint.files.deleted_files", "gone"): "the signed manifest of an image",
    ("suspension.job.announcements", "_parse"): "the announcement that root has written",
    ("suspension.interface", "owner"): "the announcement, by way of the identity of the shepherd",
    ("suspension.job.registry", "owner"): "the same",
    ("suspension.records.record", "owner"): "the journal, which only root can write",
}
"""Functions that make a ``User``, whose rights root takes."""

# (module, function): what the IDs are compared with, or shown for.
READERS = {
    ("checkpoint.criu.restore_gate", "of_process"): "compared with the credentials of the owner or of the attempt",
    ("checkpoint.inspection", "_facts_of"): "compared with the owner, for refusals",
    ("checkpoint.files.inet_sockets", "_has_unaccepted"): "finds connections of the user to itself, for a refusal",
    ("checkpoint.inspection", "_sysv"): "finds System V objects, for a refusal",
    ("checkpoint.inspection", "_uses_mps"): "finds the MPS daemon of the user, for a refusal",
    ("checkpoint.files.local_files", "used_files"): "finds files that a process of the owner has open: these stay",
    ("checkpoint.files.scratch_search", "_ambiguous"): "finds other processes of the owner, and their files",
    (
        "suspension.job.peers",
        "_examined",
    ): "compared with the connected user, who is compared with the announcement",
    ("suspension.job.peers", "_parent"): "the parent of a shepherd has to be root's",
    ("suspension.job.process_tree", "_member"): "shown in messages",
    ("suspension.inplace.gpu_sharing", "_job_above"): "compared with the announcement, as a peer",
}
"""Functions that read the IDs of a process."""
RIGHTS = {
    "as_user", "_become", "chown", "fchown", "lchown", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups",
}  # fmt: skip
"""Functions with which root takes or gives rights."""
OPENING = {"open", "Path", "open_below", "stat", "lstat", "unlink", "rename", "link", "symlink", "mkdir"}
FIELDS = {"Uid", "Gid", "Groups"}
"""Keys of ``/proc/PID/status``."""


@cache
def modules() -> dict[str, ast.Module]:
    """Return the source of every module of these packages by its name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node with the name of the innermost function around it."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
            yield inside, child
            yield from walk(child, inside)

    yield from walk(tree, "")


def called(node: ast.AST) -> str:
    """Return the last part of the name of a called function."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def places(uses: set[tuple[str, str]], known: dict[tuple[str, str], str]) -> tuple[list[object], list[object]]:
    """Return what is not in the list, and what is only in the list."""
    return sorted(uses - known.keys()), sorted(known.keys() - uses)


def makers(tree: ast.Module) -> set[str]:
    return {name for name, node in functions(tree) if called(node) == "User"}


def readers(tree: ast.Module) -> set[str]:
    return {name for name, node in functions(tree) if isinstance(node, ast.Constant) and node.value in FIELDS}


def followers(tree: ast.Module) -> set[str]:
    """Return the functions that open the target of a link of a process by its path."""
    return {
        name
        for name, node in functions(tree)
        if called(node) in OPENING
        and isinstance(node, ast.Call)
        and any(
            called(item) in {"link", "readlink"} and item is not node for arg in node.args for item in ast.walk(arg)
        )
    }


def test_owner_of_a_job_is_from_a_record() -> None:
    result = {(module, name) for module, tree in modules().items() for name in makers(tree)}
    assert places(result, OWNERS) == ([], [])


def test_ids_of_processes_are_only_compared() -> None:
    """No function that reads them takes or gives rights."""
    result = {(module, name) for module, tree in modules().items() for name in readers(tree)}
    assert places(result, READERS) == ([], [])
    users = {(m, name) for m, tree in modules().items() for name, node in functions(tree) if called(node) in RIGHTS}
    assert not users & READERS.keys()


def test_path_of_a_process_is_not_opened() -> None:
    """Its files are opened through ``/proc/PID/fd``, or below its root directory with the rights of the owner."""
    assert {(module, name) for module, tree in modules().items() for name in followers(tree)} == set()


@pytest.mark.parametrize(
    ("find", "source"),
    [
        (makers, "def f(p):\n    return User(*p.user())"),
        (makers, "def f(p):\n    return user_files.User(p.uid, p.gid)"),
        (readers, "def f(p):\n    uid = int(p.status()['Uid'].split()[0])"),
        (readers, "def f(p):\n    return p.status().get('Groups')"),
        (followers, "def f(p):\n    return os.open(p.link('fd/3'), os.O_RDONLY)"),
        (followers, "def f(p):\n    return Path(os.readlink(p)).read_text()"),
    ],
)
def test_violation_is_found(find: object, source: str) -> None:
    assert callable(find)
    assert find(ast.parse(source)) == {"f"}
