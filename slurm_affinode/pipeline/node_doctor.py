"""``doctor --all-nodes``: the checks of each node, made there through ssh or srun, and all problems in one list."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slurm_affinode.base import json_values
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.process import run as run_program
from slurm_affinode.base.text import last_line, one_line
from slurm_affinode.base.threads import pool
from slurm_affinode.model.cluster import Node
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, UNREACHABLE, Check
from slurm_affinode.slurm.hostlist import expand
from slurm_affinode.slurm.interface import Runner

Via = Literal["ssh", "srun"]
AT_ONCE = 32
CONNECT_S = 10
TIMEOUT_S = 150.0
"""Longer than the checks of a node take if nothing responds there."""
_COMMAND = ("slurm-affinode", "doctor", "--json")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_STATUSES = (OK, PROBLEM, UNREACHABLE, SKIPPED)
_NAMED_NODES = 3
"""Nodes that a row names; the others are counted."""


@dataclass(frozen=True, slots=True)
class NodeChecks:
    """The checks of one node; ``error``: why there are none."""

    node: str
    checks: tuple[Check, ...] = ()
    error: str | None = None

    @property
    def problems(self) -> list[Check]:
        """The checks that failed, and an unreachable node as one."""
        if self.error is not None:
            return [Check("node", UNREACHABLE, self.error)]
        return [check for check in self.checks if check.status in (PROBLEM, UNREACHABLE)]


def chosen(nodes: Iterable[Node], node_list: str | None) -> list[str]:
    """Return the nodes to check: those listed, else those with GPUs that are powered. Raises ``InputError``."""
    if node_list is None:
        return sorted(node.name for node in nodes if node.gpus is not None and node.powered)
    try:
        names = expand(node_list)
    except ValueError as error:
        raise InputError(f"--nodes: {error}", hint="write for example gpu[01-40],gpu99") from None
    if wrong := next((name for name in names if not _NAME.fullmatch(name)), None):
        raise InputError(f"--nodes: {wrong!r} is not the name of a node")
    return names


def argv(node: str, via: Via) -> list[str]:
    """Return the command that makes the checks on a node.

    With srun it is a job of one CPU and no GPU beside the jobs there; it is given up if it does not start at once.
    """
    if via == "ssh":
        return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "--", node, " ".join(_COMMAND)]
    return [
        "srun", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gpus=0", "--mem=256M",
        "--time=5", f"--immediate={CONNECT_S}", "--quiet", "--job-name=slurm-affinode-doctor", *_COMMAND,
    ]  # fmt: skip


def examine(
    nodes: Sequence[str], via: Via, *, run: Runner = run_program, report: Callable[[str], None] = lambda node: None
) -> list[NodeChecks]:
    """Return the checks of the nodes, in their order. ``report`` is called with each node that is done."""

    def examine_node(node: str) -> NodeChecks:
        checks = _examine(node, via, run)
        report(node)
        return checks

    with pool("doctor", AT_ONCE) as threads:
        return list(threads.map(examine_node, nodes))


def _examine(node: str, via: Via, run: Runner) -> NodeChecks:
    try:
        completed = run(argv(node, via), timeout_s=TIMEOUT_S, check=False)
    except AffinodeError as error:
        return NodeChecks(node, error=str(error))
    try:
        return NodeChecks(node, tuple(_check(value) for value in _list(completed.stdout)))
    except ValueError:
        # The status of a program that ssh could not start, or of ssh itself, says less than its last line.
        why = one_line(last_line(completed.stderr), 200) or f"no output (exit status {completed.returncode})"
        return NodeChecks(node, error=why if why.startswith(via) else f"{via}: {why}")


def _list(output: bytes) -> Sequence[Any]:
    checks = json_values.table(json_values.loads(output)).get("checks")
    if not isinstance(checks, list):
        raise ValueError("there are no checks")  # noqa: TRY004 - one kind of error for a bad reply
    return checks


def _check(value: Any) -> Check:
    table = json_values.table(value)
    name, status, detail, hint = (table.get(key) for key in ("name", "status", "detail", "hint"))
    if not isinstance(name, str) or status not in _STATUSES or not isinstance(detail, str):
        raise ValueError("it is not a check")
    return Check(name, str(status), detail, hint if isinstance(hint, str) else None)


def rows(of_nodes: Sequence[NodeChecks]) -> list[tuple[str, str, str, str]]:
    """Return the problems of all nodes, most nodes first: nodes, check, status, finding."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for node in of_nodes:
        for check in node.problems:
            groups.setdefault((check.name, check.status, check.detail), []).append(node.node)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(_names(nodes), *check) for check, nodes in ordered]


def hints(of_nodes: Sequence[NodeChecks]) -> Mapping[str, str]:
    """Return the remedies of the problems, by check."""
    return {check.name: check.hint for node in of_nodes for check in node.problems if check.hint}


def _names(nodes: Sequence[str]) -> str:
    more = len(nodes) - _NAMED_NODES
    return ", ".join(nodes[:_NAMED_NODES]) + (f" and {more} more" if more > 0 else "")


def exit_code(of_nodes: Sequence[NodeChecks]) -> int:
    """Return 0 if all checks of all nodes passed, 1 for problems, 3 if a node or a service does not respond."""
    statuses = {check.status for node in of_nodes for check in node.problems}
    return 3 if UNREACHABLE in statuses else 1 if statuses else 0
