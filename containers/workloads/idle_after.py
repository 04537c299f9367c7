#!/opt/slurm-affinode/bin/python
"""Computes, then holds GPU and memory without using them, then computes again and checks that its memory is intact."""

import sys
import time
from pathlib import Path

import gpu


def main() -> int:
    """Runs the workload. It counts while idle, so that a restored process shows where it went on."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--busy", type=float, default=20, metavar="S", help="seconds of computing at the start")
    parser.add_argument("--idle", type=float, default=600, metavar="S", help="seconds of idling after it")
    parser.add_argument("--until", type=Path, metavar="FILE", help="idle on until this file exists")
    parser.add_argument("--again", type=float, default=2, metavar="S", help="seconds of computing at the end")
    parser.add_argument("--every", type=float, default=1, metavar="S", help="a line of progress this often while idle")
    parser.add_argument("--host-mib", type=int, default=8, metavar="N", help="host memory to hold and check")
    options = parser.parse_args()
    device, buffer = gpu.start(options)
    host = bytes([7]) * (options.host_mib * gpu.MIB)
    gpu.say("busy", seconds=options.busy)
    device.compute(options.busy)
    gpu.say("idle", seconds=options.idle)
    # Counted, not timed: the steps made before a suspension are not made again after it, whatever the clock says.
    for step in gpu.steps(max(1, round(options.idle / options.every)), options.until):
        time.sleep(options.every)
        gpu.say("step", number=step)
    gpu.say("again", seconds=options.again)
    device.compute(options.again)
    if host.count(7) != len(host):
        gpu.say("end", memory="host memory damaged")
        return 9
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
