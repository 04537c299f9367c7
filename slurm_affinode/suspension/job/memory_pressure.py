"""Use of memory in a cgroup that is at its limit, so that the kernel ends the process that uses most of it.

In version 1, lowering a limit ends no process, and a process that allocates nothing more never reaches it. This module
is therefore also a program, which moves into the cgroup and uses a few MiB. The kernel then acts, and reports to Slurm,
as if the job had done so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from pathlib import Path

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import of_module, run
from slurm_affinode.suspension.job.cgroup import Cgroup

_BYTES = 16 << 20
_TIMEOUT_S = 5.0


def press(group: Cgroup) -> None:
    """Use memory in a cgroup; return when a process of it was ended, or there was room. Raises ``OSError``."""
    procs = group.open("cgroup.procs")
    try:
        # If the kernel ends the program itself, or can end nothing, the caller finds the same use as before.
        with contextlib.suppress(UnreachableError):
            run(of_module(__name__, str(procs)), timeout_s=_TIMEOUT_S, check=False, pass_fds=(procs,))
    finally:
        os.close(procs)


def main() -> None:
    """Move into the cgroup of a descriptor, and use memory."""
    with contextlib.suppress(OSError):  # without CAP_SYS_RESOURCE, the largest process ends
        Path("/proc/self/oom_score_adj").write_text("-1000", "ascii")
    os.write(int(sys.argv[1]), b"0")
    with mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for offset in range(0, _BYTES, mmap.PAGESIZE):
            memory[offset] = 1


if __name__ == "__main__":
    main()
