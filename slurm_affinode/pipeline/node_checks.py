"""Checks of ``doctor`` on a node with an agent: CRIU and the kernel, munge, GPUs, shared store. Read-only."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_affinode.base import process
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.pipeline.checks import OK, PROBLEM, UNREACHABLE, Check, guarded
from slurm_affinode.slurm.interface import Runner, complaint

_TIMEOUT_S = 30.0


def examine(config: Config, run: Runner = process.run) -> list[Check]:
    """Return the checks of this node; none without a shared store or a readable key, where no agent can run."""
    suspend = config.suspend
    if suspend.shared_store is None or not os.access(suspend.key_file, os.R_OK):
        return []
    checks = guarded("CRIU", lambda: [criu(suspend.criu, run)])
    if config.agent.listen:
        checks.append(munge(run))
    return [*checks, *clock(run), *persistence_mode(run), *shared_store(suspend.shared_store)]


def criu(program: str, run: Runner) -> Check:
    """Check the release of CRIU, and with ``criu check`` the kernel. Raises ``CheckpointError``."""
    version = Criu(program=program, runner=run).check()
    done = run([process.find(program), "check"], timeout_s=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        hint = (
            f"run {program} check --all; boot a kernel that has the missing features, such as that of the distribution"
        )
        return Check("CRIU", PROBLEM, f"version {version} does not work with this kernel: {complaint(done)}", hint)
    return Check("CRIU", OK, f"version {version}, and the kernel has what it needs")


def munge(run: Runner) -> Check:
    """Check that munged certifies messages, without which no login node reaches the agent."""
    try:
        done = run(["munge", "--no-input"], timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError as error:
        return Check("munge", UNREACHABLE, str(error), "install munge, with the key of the cluster")
    if done.returncode != 0:
        return Check("munge", UNREACHABLE, f"no credential: {complaint(done)}", "systemctl enable --now munge")
    return Check("munge", OK, "certifies messages")


def clock(run: Runner) -> list[Check]:
    """Check that the clock is synchronized: credentials of munge expire; nothing without ``timedatectl``."""
    query = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        done = run(query, timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError:
        return []
    synchronized = done.stdout.decode("utf-8", "replace").strip()
    if synchronized == "no":
        hint = "systemctl enable --now chrony (chronyd on RHEL), or systemd-timesyncd"
        return [Check("clock", PROBLEM, "is not synchronized: other nodes may reject credentials of munge", hint)]
    return [Check("clock", OK, "is synchronized")] if synchronized == "yes" else []


def persistence_mode(run: Runner) -> list[Check]:
    """Check that the driver stays loaded while no process uses a GPU; nothing without ``nvidia-smi``."""
    query = ["nvidia-smi", "--query-gpu=index,persistence_mode", "--format=csv,noheader"]
    try:
        done = run(query, timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError:
        return []
    modes = dict(line.split(", ", 1) for line in done.stdout.decode("utf-8", "replace").splitlines() if ", " in line)
    if done.returncode != 0 or not modes:
        return []  # the check of the driver says why
    if disabled := [gpu for gpu, mode in modes.items() if mode.strip() == "Disabled"]:
        detail = f"off for GPU {', '.join(disabled)}: each restore waits until the driver is loaded"
        return [Check("persistence mode", PROBLEM, detail, "systemctl enable --now nvidia-persistenced")]
    return [Check("persistence mode", OK, "on")]


def shared_store(path: Path) -> list[Check]:
    """Check that root may write to the shared store, which an export with ``root_squash`` prevents."""
    if not path.exists():
        where = path.parent
        hint = f"mount it, or create it: install -d -m 0700 {path}"
        return [] if where.exists() else [Check("shared store", PROBLEM, f"{where}: does not exist", hint)]
    if not os.access(path, os.W_OK | os.X_OK):
        hint = f"export it with no_root_squash; without NFS: chown root: {path} && chmod 0700 {path}"
        return [Check("shared store", PROBLEM, f"{path}: this user may not write to it", hint)]
    return [Check("shared store", OK, f"{path}: can be written")]
