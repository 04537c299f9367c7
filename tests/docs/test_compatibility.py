"""The page on compatibility: every cell is an existing test, a code of a refusal, or says that nothing was tested."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from slurm_affinode.model.suspension import RefusalCode
from slurm_affinode.suspension.compatibility import CompatibilityRow

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "compatibility.md").read_text(encoding="utf-8")
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_CODE = re.compile(r"`([a-z-]+)`")


def rows() -> list[list[str]]:
    """Return the cells of the table, without its head."""
    result = [line.strip("|\n ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    return [cells for cells in result if cells[0] not in ("a job started as", "---")]


def test_table_is_found() -> None:
    assert len(rows()) >= 15


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_cell_is_a_test_or_a_code(row: list[str]) -> None:
    assert len(row) == 3
    for cell in row[1:]:
        if (test := _TEST.fullmatch(cell)) is not None:
            tree = ast.parse((REPOSITORY / "tests" / test[1]).read_text(encoding="utf-8"))
            assert test[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        elif (code := _CODE.fullmatch(cell)) is not None:
            assert code[1] in set(RefusalCode), code[1]
        else:
            assert cell == "not tested"


NOT_DETECTED = {
    "srun --mpi, srun --pty, several nodes in one step",
    "server at 0.0.0.0 or at the address of its host",
    "inference server (llama.cpp)",
    "local scratch (mktemp -d, closed files in /tmp)",
    "server on libuv or uvloop (Node.js, vLLM)",
    "program with shared memory in /dev/shm",
    "salloc, srun from the shell",
    "preemptible job, requeued after a restore",
    "two mpirun on one node, or one after a killed one",
    "script with a death signal (setpriv --pdeathsig)",
    "setgid program (ssh-agent)",
    "server in Go",
    "program in a multicast group (UDP)",
    "program with a socket of MPTCP",
    "program that is executed from memory (memfd_create), or has mapped a sealed file there",
    "Windows program (Wine) with system calls of its own, or segments",
    "program that uses AMX (PyTorch and vLLM on CPUs), or with PR_SET_MDWE",
    "program with no_new_privs (Landlock, sandboxes)",
}
"""Rows that ``status`` does not name: properties of programs, and jobs without the option."""


def test_kinds_in_status_are_rows_of_the_table() -> None:
    """Both have the same names, in the same order."""
    named = [row[0].replace("`", "") for row in rows()]
    assert [name for name in named if name not in NOT_DETECTED] == [kind.value for kind in CompatibilityRow]
    assert set(named) >= NOT_DETECTED
