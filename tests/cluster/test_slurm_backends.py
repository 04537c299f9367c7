"""Comparison of both Slurm backends on a live cluster, and failures of the pyslurm process."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest
from cluster.driver import Cluster, wait_until
from cluster.slurm_clients import CPU, GPU, HALF_HOUR, NO_PYSLURM, runner, starter

from slurm_affinode.slurm import interface, scontrol
from slurm_affinode.slurm.client import examine, open_client
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.pyslurm_client import PyslurmClient

pytestmark = [pytest.mark.cluster, pytest.mark.main]


def both(cluster: Cluster) -> tuple[CommandsClient, PyslurmClient]:
    """Return the clients of both backends, as root."""
    if cluster.release != "26.05":
        pytest.skip(NO_PYSLURM)
    commands = CommandsClient(runner(cluster, "root"))
    return commands, PyslurmClient(commands, starter(cluster, "root"))


def test_backends_report_the_same(cluster: Cluster) -> None:
    """All fields of jobs and nodes are equal, except exit statuses of failed jobs, which pyslurm does not report."""
    commands, pyslurm = both(cluster)
    cluster.wait_for_state(cluster.submit(*GPU, "--array=1-3%1", wrap=HALF_HOUR) + "_1", "RUNNING")
    # Its CPUs differ from its tasks and nodes: 26.05 has moved the fields beside them in libslurm's struct.
    cluster.wait_for_state(cluster.submit(*CPU, "--ntasks=2", "--cpus-per-task=3", wrap=HALF_HOUR), "RUNNING")
    team = cluster.submit(*CPU, "--hold", ":", *CPU, wrap=HALF_HOUR)
    cluster.wait_for_state(cluster.submit(*CPU, wrap="exit 3"), "FAILED")
    with pyslurm:
        # Slurm schedules every two seconds: wait until both have read the same plan.
        wait_until("both report the same", lambda: differences(commands, pyslurm), lambda result: not result)
        assert {node.name: node for node in commands.nodes()} == {node.name: node for node in pyslurm.nodes()}
        commands.cancel(team)


def test_data_parsers_report_the_same(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data parser of this Slurm that is known gives the same jobs, steps and nodes."""
    run = runner(cluster, "root")
    cluster.wait_for_output(
        cluster.submit(*GPU, wrap="srun sh -c 'echo its step runs; exec sleep 1800'"), "its step runs"
    )
    cluster.submit(*CPU, "--hold", wrap=HALF_HOUR)
    listed = run(scontrol.LIST_PARSERS, timeout_s=30).stdout.decode()
    result = {}
    for name in (name for name in scontrol.PARSERS if f"data_parser/{name}\n" in listed):
        monkeypatch.setattr(scontrol, "parser", lambda _, name=name: name)
        client = CommandsClient(run)
        jobs = [replace(job, priority=None, end=None) for job in client.jobs(steps=True)]
        result[name] = (jobs, client.nodes())
    assert len(result) == (4 if cluster.release == "26.05" else 1)
    for name, (jobs, nodes) in result.items():
        first_jobs, first_nodes = result["v0.0.42"]
        assert [(name, *pair) for pair in zip(first_jobs, jobs, strict=True) if pair[0] != pair[1]] == []
        assert [(name, *pair) for pair in zip(first_nodes, nodes, strict=True) if pair[0] != pair[1]] == []


def differences(left: SlurmClient, right: SlurmClient) -> list[str]:
    """Return the differences between the jobs that both clients report."""
    first, second = ({job.id: job for job in client.jobs(steps=True, gpu_detail=True)} for client in (left, right))
    result = [f"only one has {name}" for name in first.keys() ^ second.keys()]
    for name in first.keys() & second.keys():
        for attribute in (each.name for each in fields(first[name]) if each.name != "exit_code"):
            first_value, second_value = getattr(first[name], attribute), getattr(second[name], attribute)
            if first_value != second_value:
                result.append(f"{name} {attribute}: {first_value!r}, {second_value!r}")
    return result


def test_auto_selects_pyslurm_or_reports_reason(cluster: Cluster) -> None:
    """On 26.05, pyslurm is built for the cluster's Slurm; on 24.11 it cannot be imported."""
    run, start = runner(cluster, "root"), starter(cluster, "root")
    # pyslurm is for 25.11: without a running job it cannot be verified.
    cluster.wait_for_state(cluster.submit(*CPU, "--ntasks=2", "--cpus-per-task=3", wrap=HALF_HOUR), "RUNNING")
    commands, pyslurm = examine(run, start)
    assert commands.usable
    with open_client("auto", run=run, start=start) as client:
        if cluster.release == "26.05":
            assert (client.backend, pyslurm.reason) == ("pyslurm", None)
            return
        assert client.backend == "commands"
    assert "No module named 'pyslurm'" in str(pyslurm.reason)
    with pytest.raises(interface.BackendUnusableError, match="No module named"):
        open_client("pyslurm", run=run, start=start)


def test_missing_configuration_ends_only_pyslurm_process(cluster: Cluster) -> None:
    """libslurm ends the pyslurm process; the client reports an error, and ``auto`` falls back to commands."""
    commands, _ = both(cluster)
    lost = starter(cluster, "root", "SLURM_CONF=/nonexistent/slurm.conf")
    with PyslurmClient(commands, lost) as client, pytest.raises(interface.ControllerDownError, match=r"slurm\.conf"):
        client.jobs()
    with open_client("auto", run=runner(cluster, "root"), start=lost) as client:
        assert client.backend == "commands"


def test_killed_pyslurm_process_is_replaced(cluster: Cluster) -> None:
    """The process is killed between requests and during one."""
    _, client = both(cluster)
    with client:
        assert len(client.nodes()) == 3
        worker = "[p]yslurm_worker"  # the brackets keep the pattern from matching its own shell
        cluster.shell("login", f"pkill -KILL -f {worker}")
        assert len(client.nodes()) == 3
        began = time.monotonic()
        cluster.shell("login", f"pkill -STOP -f {worker}; (sleep 1; pkill -KILL -f {worker}) >/dev/null 2>&1 &")
        assert len(client.nodes()) == 3
        assert time.monotonic() - began < 30


def test_doctor_reports_slurm_backend(cluster: Cluster) -> None:
    """``doctor`` on the login node reports the backend installed there.

    A pyslurm for another release is used once it has been verified with a running job.
    """
    if cluster.release == "26.05":
        printed = cluster.run("login", "slurm-affinode", "doctor").stdout
        assert "no job runs with which it could be verified" in " ".join(printed.split())
    job = cluster.submit("--partition=gpu", wrap="sleep 600")
    cluster.wait_for_state(job, "RUNNING")
    printed = cluster.run("login", "slurm-affinode", "doctor").stdout
    used = "pyslurm (auto was requested)" if cluster.release == "26.05" else "commands (auto was requested)"
    for words in (used, f"version {cluster.release}.", "slurmctld", "slurmdbd", "AccountingStorageTRES="):
        assert words in " ".join(printed.split())
    forced = cluster.run("login", "slurm-affinode", "doctor", "--slurm-backend=commands").stdout
    assert "commands (commands was requested)" in " ".join(forced.split())
