"""Clients of the live Slurm that run outside the containers and use ``docker exec``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.driver import Cluster

from slurm_affinode.base import process
from slurm_affinode.base.process import Child, Completed, Helper
from slurm_affinode.slurm.pyslurm_client import MODULE

HALF_HOUR = "sleep 1800"
CPU = ("--partition=cpu", "--mem=100")
GPU = ("--partition=gpu", "--gres=gpu:1", "--mem=100")
PYTHON = "/opt/slurm-affinode/bin/python"
NO_PYSLURM = "pyslurm needs Slurm >= 25.11: the 26.05 cluster runs these"


def runner(cluster: Cluster, user: str) -> Callable[..., Completed]:
    """Return ``process.run`` for the login node."""

    def run(
        argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        words = ("docker", "exec", f"--user={user}", cluster.container("login"), *argv)
        return process.run(words, timeout_s=timeout_s, check=check)

    return run


def starter(cluster: Cluster, user: str, *settings: str) -> Callable[[], Helper]:
    """Return a function that starts the pyslurm process on the login node."""
    options = [f"--env={setting}" for setting in ("PYSLURM_DISABLE_AUTO_INIT=1", *settings)]
    argv = (
        "docker",
        "exec",
        "--interactive",
        f"--user={user}",
        *options,
        cluster.container("login"),
        PYTHON,
        "-m",
        MODULE,
    )
    return lambda: Child(argv)
