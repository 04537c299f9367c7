#!/opt/slurm-affinode/bin/python
"""Pins most of a GPU's memory and never computes: what a forgotten notebook does."""

import sys
import time

import gpu


def main() -> int:
    """Runs the workload."""
    parser = gpu.parser(__doc__)
    parser.set_defaults(memory_mib=40000)
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="how long")
    options = parser.parse_args()
    device, buffer = gpu.start(options)
    gpu.say("squatting", seconds=options.seconds)
    time.sleep(options.seconds)
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
