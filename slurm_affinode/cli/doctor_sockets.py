"""``doctor``: could requests to jobs that sleep in place be noticed on this machine?"""

from __future__ import annotations

from collections.abc import Callable

from slurm_affinode.agent.inplace.sockdiag import SockDiag, SockDiagError
from slurm_affinode.workflow.check import OK, SKIPPED, Check

NAME = "sockets of jobs"


def check(open_diag: Callable[[], SockDiag] = SockDiag) -> Check:
    """Whether the kernel tells what waits on sockets (``sock_diag``). Without it only ``mode=inplace`` is refused."""
    try:
        diag = open_diag()
        try:
            count = len(diag.dump())
        finally:
            diag.close()
    except SockDiagError as error:
        return Check(
            NAME, SKIPPED, f"requests to jobs that sleep in place cannot be noticed: {error}",
            "load the kernel modules tcp_diag and unix_diag, where mode=inplace is to be used",
        )  # fmt: skip
    return Check(NAME, OK, f"the kernel tells of {count} sockets: requests to jobs that sleep in place are noticed")
