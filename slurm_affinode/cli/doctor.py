"""``slurm-affinode doctor``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

import click

from slurm_affinode.cli import doctor_sockets
from slurm_affinode.cli.images import shared_images
from slurm_affinode.cli.options import config_options, json_option, print_json, print_table, slurm_options
from slurm_affinode.config import Config
from slurm_affinode.workflow import doctor_cuda
from slurm_affinode.workflow.doctor import examine, exit_code

_EPILOG = """\b
Exit status: 0 all right, 1 problems were found, 3 something does not answer.
  slurm-affinode doctor
  slurm-affinode doctor --json | jq '.checks[] | select(.status != "ok")'
  slurm-affinode doctor --json | jq '.cuda.features[] | {name, available, why}'
"""


@click.command(epilog=_EPILOG)
@json_option
@config_options
@slurm_options
def doctor(*, config: Config, as_json: bool) -> int:
    """Check configuration, store, GPU history, accounting and GPU driver of this machine. Nothing is changed.

    Looks at the configuration and the time zone, whether the state directory and the reports can be written, whether
    the store answers and has its schema, how old the newest data is, whether the Prometheus server of the configuration
    answers and has GPU metrics, which way of speaking to Slurm is used, which there are and why not the others, whether
    slurmctld, slurmdbd and sacct answer, and whether Slurm counts GPUs (AccountingStorageTRES). Where jobs can be
    suspended it also looks whether processes of a user may trace those that are being restored (Yama); as root on a
    node with an agent also whether the sweep of images waits for an administrator, and whether the notes beside the
    shared store are signed.

    A table shows what the NVIDIA driver of this machine can do for a suspension: lock with a time-out, checkpoint,
    restore, restore on other GPUs, CUDA IPC, custom storage; the branch of the driver that brought it, what it is
    used for, and what shows that it is there or why it is not.
    """
    checks = examine(config, now=datetime.now(UTC))
    cuda = doctor_cuda.look()
    checks += [doctor_cuda.check(cuda), doctor_sockets.check(), shared_images(config)]
    code = exit_code(checks)
    if as_json:
        print_json({"ok": code == 0, "checks": [asdict(check) for check in checks], "cuda": cuda.as_json()})
        return code
    print_table(("check", "", "finding"), ((check.name, check.status, check.detail) for check in checks))
    click.echo()
    print_table(("feature of the driver", "since", "used for", "here", ""), cuda.rows(), title=_title(cuda))
    hints = [f"  {check.name}: {check.hint}" for check in checks if check.hint and check.status != "ok"]
    if hints:
        click.echo("\nWhat to do:\n" + "\n".join(hints))
    return code


def _title(report: doctor_cuda.CudaReport) -> str:
    can = report.capabilities
    if can.driver is None:
        return "NVIDIA driver: none" if report.hint is None else "NVIDIA driver: does not answer"
    parts = [f"NVIDIA driver {can.driver}"]
    if can.cuda is not None:
        parts.append(f"CUDA {can.cuda}")
    if can.bindings is not None or doctor_cuda.no_bindings(can):
        parts.append(f"cuda-bindings {can.bindings or 'not installed'}")
    return ", ".join(parts)
