"""The checks of all nodes: how they are made, and how problems are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.cli import doctor as command
from slurm_affinode.cli.main import cli
from slurm_affinode.pipeline import node_doctor
from slurm_affinode.pipeline.checks import Check

GOOD = {"ok": True, "checks": [{"name": "Slurm", "status": "ok", "detail": "version 26.05", "hint": None}]}
BAD = {"ok": False, "checks": [
    {"name": "Slurm", "status": "ok", "detail": "version 26.05", "hint": None},
    {"name": "process tracing", "status": "problem", "detail": "ptrace_scope is 0", "hint": "sysctl -w ..."},
]}  # fmt: skip


class Cluster:
    """Programs that run on nodes: what each node replies."""

    def __init__(self, replies: Mapping[str, object]) -> None:
        self.replies = replies
        self.calls: list[list[str]] = []

    def run(self, argv: Sequence[str], **_: Any) -> Completed:
        self.calls.append(list(argv))
        node = next(node for node in self.replies if node in argv or f"--nodelist={node}" in argv)
        reply = self.replies[node]
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, str):
            return Completed(tuple(argv), 255, b"", reply)
        return Completed(tuple(argv), 0, json.dumps(reply).encode(), "")


def test_problems_of_all_nodes_are_one_list() -> None:
    """Equal problems are one row, most nodes first; a node without a reply is one."""
    names = [f"gpu{number:02}" for number in range(1, 7)]
    replies: dict[str, object] = dict.fromkeys(names, BAD) | {"gpu05": GOOD, "gpu06": "ssh: no route to host\n"}
    examination = node_doctor.examine(names, "ssh", run=Cluster(replies).run)
    assert [item.node for item in examination] == names
    assert node_doctor.rows(examination) == [
        ("gpu01, gpu02, gpu03 and 1 more", "process tracing", "problem", "ptrace_scope is 0"),
        ("gpu06", "node", "unreachable", "ssh: no route to host"),
    ]
    assert node_doctor.hints(examination) == {"process tracing": "sysctl -w ..."}
    assert node_doctor.exit_code(examination) == 3
    assert node_doctor.exit_code(examination[:5]) == 1
    assert node_doctor.exit_code(examination[4:5]) == 0


@pytest.mark.parametrize(
    "reply",
    [[], {}, {"checks": 7}, {"checks": [{"name": "x"}]}, {"checks": [{"name": "x", "status": "?", "detail": ""}]}],
)
def test_reply_of_another_form_is_an_error_of_the_node(reply: object) -> None:
    [examination] = node_doctor.examine(["n1"], "ssh", run=Cluster({"n1": reply}).run)
    assert examination.checks == ()
    assert examination.error == "ssh: no output (exit status 0)"


def test_node_on_which_no_program_can_be_started_is_an_error() -> None:
    [examination] = node_doctor.examine(["n1"], "srun", run=Cluster({"n1": UnreachableError("srun: timed out")}).run)
    assert examination.problems == [Check("node", "unreachable", "srun: timed out")]


def test_commands_ask_for_no_password_and_for_no_gpu() -> None:
    """ssh gets the node after ``--``; srun runs beside the jobs on a node and does not wait for it."""
    ssh = node_doctor.argv("n1", "ssh")
    assert ssh[-3:] == ["--", "n1", "slurm-affinode doctor --json"]
    assert "BatchMode=yes" in ssh
    srun = node_doctor.argv("n1", "srun")
    assert {"--nodelist=n1", "--gpus=0", "--immediate=10"} <= set(srun)
    assert srun[-3:] == ["slurm-affinode", "doctor", "--json"]


@pytest.mark.parametrize("listed", ["-oProxyCommand=x", "n[1-", "a b"])
def test_invalid_lists_of_nodes_are_rejected(listed: str) -> None:
    with pytest.raises(InputError, match="--nodes"):
        node_doctor.chosen((), listed)


def test_doctor_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster({"n1": GOOD, "n2": BAD})
    monkeypatch.setattr(command, "run_program", cluster.run)
    arguments = ["doctor", "--all-nodes", "--nodes", "n[1-2]"]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False, env={"SLURM_AFFINODE_CONFIG": None})
    assert done.return_value == 1, done.output
    assert "1 of 2 nodes passed all checks" in done.output
    assert "n2" in done.output
    assert "process tracing: sysctl -w ..." in done.output
    done = CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False)
    nodes = json.loads(done.output)["nodes"]
    assert nodes["n1"]["error"] is None
    assert nodes["n2"]["checks"][1]["status"] == "problem"


def test_via_needs_all_nodes() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--via", "srun"])
    assert done.exit_code == 2
    assert "--all-nodes" in done.output
