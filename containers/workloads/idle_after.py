#!/opt/slurm-affinode/bin/python
"""Compute, hold GPU and memory without using them, compute again, and verify the memory."""

import sys
import time
from pathlib import Path

import gpu


def main() -> int:
    """Run the workload. It counts while idle, so that its output shows where a restored process continued."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--busy", type=float, default=20, metavar="S", help="seconds of computing at the start")
    parser.add_argument("--idle", type=float, default=600, metavar="S", help="seconds of idling after it")
    parser.add_argument("--until", type=Path, metavar="FILE", help="stay idle until this file exists")
    parser.add_argument("--again", type=float, default=2, metavar="S", help="seconds of computing at the end")
    parser.add_argument("--every", type=float, default=1, metavar="S", help="seconds between two steps while idle")
    parser.add_argument("--host-mib", type=int, default=8, metavar="N", help="host memory to hold and check")
    options = parser.parse_args()
    device, buffer = gpu.start(options)
    host = bytes([7]) * (options.host_mib * gpu.MIB)
    gpu.log("busy", seconds=options.busy)
    device.compute(options.busy)
    gpu.log("idle", seconds=options.idle)
    # Counted instead of timed: the steps before a suspension are not repeated after it, whatever the clock shows.
    for step in gpu.steps(max(1, round(options.idle / options.every)), options.until):
        time.sleep(options.every)
        gpu.log("step", number=step)
    gpu.log("again", seconds=options.again)
    device.compute(options.again)
    if host.count(7) != len(host):
        gpu.log("end", memory="host memory damaged")
        return 9
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
