#!/opt/slurm-affinode/bin/python
"""Hold most of a GPU's memory and never compute, like a forgotten notebook."""

import sys
import time

import gpu


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.set_defaults(memory_mib=40000)
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="duration in seconds")
    options = parser.parse_args()
    device, buffer = gpu.start(options)
    gpu.log("squatting", seconds=options.seconds)
    time.sleep(options.seconds)
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
