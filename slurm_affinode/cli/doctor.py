"""``slurm-affinode doctor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from slurm_affinode.agent.client import ask_local, local_pid
from slurm_affinode.base.config import Config
from slurm_affinode.base.process import run as run_program
from slurm_affinode.base.text import counted
from slurm_affinode.cli.command import command
from slurm_affinode.cli.images import shared_images
from slurm_affinode.cli.options import config_options, echo, json_option, print_json, print_table, slurm_options, warn
from slurm_affinode.model.cluster import Node
from slurm_affinode.pipeline import bundle as bundles
from slurm_affinode.pipeline import driver_check, node_checks, node_doctor
from slurm_affinode.pipeline.checks import OK, SKIPPED, Check
from slurm_affinode.pipeline.doctor import check_configuration, examine, exit_code
from slurm_affinode.pipeline.node_doctor import Via
from slurm_affinode.slurm.client import open_client
from slurm_affinode.suspension.inplace.sock_diag import SockDiag, SockDiagError

NAME = "sockets of jobs"


def check(open_diag: Callable[[], SockDiag] = SockDiag) -> Check:
    """Check that the kernel reports queued data of sockets (``sock_diag``), which only ``mode=inplace`` requires."""
    try:
        diag = open_diag()
        try:
            count = len(diag.dump())
        finally:
            diag.close()
    except SockDiagError as error:
        return Check(
            NAME, SKIPPED, f"requests to jobs that sleep in place cannot be detected: {error}",
            "load the kernel modules tcp_diag and unix_diag, where mode=inplace is to be used",
        )  # fmt: skip
    return Check(NAME, OK, f"the kernel lists {count} sockets: requests to jobs that sleep in place are detected")


_EPILOG = """\b
Exit status: 0 all checks passed, 1 problems found, 3 a service does not respond.
  slurm-affinode doctor
  slurm-affinode doctor --json | jq '.checks[] | select(.status != "ok")'
  slurm-affinode doctor --json | jq '.cuda.features[] | {name, available, why}'
  slurm-affinode doctor --only-config --config new.toml    status 2 if it has a mistake
  slurm-affinode doctor --all-nodes                the checks of each node with GPUs, through ssh
  slurm-affinode doctor --all-nodes --nodes 'gpu[01-40]' --via srun
  slurm-affinode doctor --bundle support.tar.gz    for a support request: checks, settings, logs; secrets are removed
"""


@command(epilog=_EPILOG)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write checks, settings and logs to FILE (tar.gz), without secrets",
)
@click.option("--all-nodes", is_flag=True, help="Make the checks on the nodes with GPUs, and show all problems")
@click.option("--nodes", "node_list", metavar="LIST", help="With --all-nodes: these nodes, such as gpu[01-40]")
@click.option(
    "--via",
    type=click.Choice(("ssh", "srun")),
    help="With --all-nodes: start the checks through this [default: ssh]",
)
@click.option("--only-config", is_flag=True, help="Check the configuration file alone, and connect to nothing")
@json_option
@config_options
@slurm_options
def doctor(
    *, config: Config, as_json: bool, bundle: Path | None, all_nodes: bool, node_list: str | None, via: Via | None,
    only_config: bool,
) -> int:  # fmt: skip
    """Check configuration, database, GPU metrics, accounting and GPU driver of this machine. Read-only.

    With --all-nodes, the same is done on each node, up to 32 at a time, and equal problems are one row. ssh must work
    without a password; checks for root need root there. srun starts a short job without GPUs on each node.

    Checks the configuration and the time zone; write access to the state directory and the reports; the database
    and its schema; the age of the newest data; the configured Prometheus server and its GPU metrics; the access to
    Slurm and its alternatives; releases of Slurm and munge with known security holes; slurmctld, slurmdbd and sacct;
    and whether Slurm accounts for GPUs (AccountingStorageTRES). Where jobs can be suspended, it checks whether users
    can trace processes during a restore (Yama), and whether jobs can have shares of GPUs; as root on a node with an
    agent, also CRIU and what it needs of the kernel, munge, the clock, the persistence mode of the GPUs, owner and
    write access of the shared store, the limits and rights with which the agent runs, cgroups, host memory against GPU
    memory, namespaces, services such as SSSD to which jobs keep connections, the SPANK plugin against Slurm and the
    agent, whether the sweep of images waits for an administrator, and whether the notes beside the shared store are
    signed.

    Without the extra analysis, as on nodes, database, GPU metrics, sacct and reports are not checked.

    A table lists what the NVIDIA driver of this machine supports for a suspension: lock with a timeout, checkpoint,
    restore, restore on other GPUs, CUDA IPC, custom storage; with the driver branch, the purpose, and the evidence.
    """
    if (node_list or via) and not all_nodes:
        raise click.UsageError("--nodes and --via need --all-nodes")
    if only_config and (all_nodes or bundle is not None):
        raise click.UsageError("--only-config cannot be combined with --all-nodes or --bundle")
    if all_nodes:
        return _examine_nodes(config, node_list, via or "ssh", as_json=as_json)
    if only_config:
        return _report_configuration(config, as_json=as_json)
    checks = examine(config, now=datetime.now(UTC))
    cuda = driver_check.check_cuda()
    of_node = node_checks.examine(config, gpus=cuda.gpus, agent=lambda: local_pid(config.agent.run_dir))
    checks += [driver_check.check(cuda), check(), *of_node, shared_images(config)]
    code = exit_code(checks)
    if bundle is not None:
        _write_bundle(bundle, config, {"checks": [asdict(check) for check in checks], "cuda": cuda.as_json()})
        return code
    if as_json:
        print_json({"ok": code == 0, "checks": [asdict(check) for check in checks], "cuda": cuda.as_json()})
        return code
    print_table(("check", "", "finding"), ((check.name, check.status, check.detail) for check in checks))
    echo()
    print_table(("feature of the driver", "since", "used for", "here", ""), cuda.rows(), title=_title(cuda))
    hints = [f"  {check.name}: {check.hint}" for check in checks if check.hint and check.status != "ok"]
    if hints:
        echo("", "What to do:", *hints)
    return code


def _examine_nodes(config: Config, node_list: str | None, via: Via, *, as_json: bool) -> int:
    nodes: Sequence[Node] = ()
    if node_list is None:
        with open_client(config.slurm.backend, warned=warn) as client:  # type: ignore[arg-type]
            nodes = client.nodes()
    names = node_doctor.chosen(nodes, node_list)
    of_nodes = node_doctor.examine(names, via, run=run_program)
    code = node_doctor.exit_code(of_nodes)
    if as_json:
        values = {
            node.node: {"error": node.error, "checks": [asdict(check) for check in node.checks]} for node in of_nodes
        }
        print_json({"ok": code == 0, "nodes": values})
        return code
    sound = sum(not node.problems for node in of_nodes)
    echo(f"{sound} of {counted(len(of_nodes), 'node')} passed all checks")
    if rows := node_doctor.rows(of_nodes):
        print_table(("nodes", "check", "", "finding"), rows)
    if hints := node_doctor.hints(of_nodes):
        echo("", "What to do:", *(f"  {name}: {hint}" for name, hint in hints.items()))
    return code


def _report_configuration(config: Config, *, as_json: bool) -> int:
    """Report that the configuration is valid; an invalid one ends the command with status 2."""
    outcome = check_configuration(config)
    if as_json:
        print_json({"ok": True, "checks": [asdict(outcome)]})
    else:
        echo(outcome.detail if config.source is None else f"{outcome.detail}: no mistakes")
    return 0


def _write_bundle(path: Path, config: Config, checks: Mapping[str, Any]) -> None:
    run_dir = config.agent.run_dir
    names, removed = bundles.write(path, config, checks, lambda: ask_local(run_dir, {"verb": "metrics"}, timeout_s=5.0))
    echo(
        f"{path}: {counted(len(names), 'file')}, {counted(removed, 'secret')} removed",
        "It has names of users, jobs and nodes in logs: look through it before you pass it on.",
    )


def _title(report: driver_check.CudaReport) -> str:
    can = report.capabilities
    if can.driver is None:
        return "NVIDIA driver: none" if report.hint is None else "NVIDIA driver: does not respond"
    parts = [f"NVIDIA driver {can.driver}"]
    if can.cuda is not None:
        parts.append(f"CUDA {can.cuda}")
    if can.bindings is not None or driver_check.no_bindings(can):
        parts.append(f"cuda-bindings {can.bindings or 'not installed'}")
    return ", ".join(parts)
