#!/opt/slurm-affinode/bin/python
"""Compute in bursts with pauses between them: idle most of the time, but never for long."""

import sys
import time

import gpu


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--burst", type=float, default=1, metavar="S", help="seconds of a burst")
    parser.add_argument("--pause", type=float, default=4, metavar="S", help="seconds between two bursts")
    parser.add_argument("--count", type=int, default=12, metavar="N", help="number of bursts")
    options = parser.parse_args()
    device, buffer = gpu.start(options)
    for number in range(1, options.count + 1):
        gpu.log("burst", number=number)
        device.compute(options.burst)
        gpu.log("pause", number=number)
        time.sleep(options.pause)
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
