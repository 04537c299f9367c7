#!/opt/slurm-affinode/bin/python
"""Leave a process behind that holds GPU memory after the end of the job: a daemon outside of the job's cgroups."""

import argparse
import os
import sys
import time
from pathlib import Path

import gpu

CGROUPS = Path("/sys/fs/cgroup")


def main() -> int:
    """Run the workload. The child has left the job's process tree before it opens the GPU."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--outlive", type=float, default=600, metavar="S", help="lifetime of the leftover in seconds")
    parser.add_argument("--compute", action="store_true", help="let the leftover compute, not only hold memory")
    options = parser.parse_args()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.close(reader)
        leftover(options, writer)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as reports:
        pid = reports.read().strip()
    gpu.log("left", leftover=pid or "failed")
    return 0 if pid else 1


def leave_cgroups() -> None:
    """Move this process to cgroups of its user, as ``systemd-run --user`` does: Slurm kills those in the job's."""
    for row in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = row.split(":", 2)
        if path.startswith(("/slurm", "/system.slice")):
            (CGROUPS / controllers / "user.slice" / "cgroup.procs").write_text("0")


def leftover(options: argparse.Namespace, ready: int) -> None:
    """Run the leftover process: close the job's output, and report its PID once it holds the memory."""
    device, _buffer = gpu.start(options)
    leave_cgroups()  # after the job's GPU is open: outside of the job, its index is that of another GPU
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.write(ready, str(os.getpid()).encode())
    os.close(ready)
    if options.compute:
        device.compute(options.outlive)
    else:
        time.sleep(options.outlive)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
