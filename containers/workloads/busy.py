#!/opt/slurm-affinode/bin/python
"""Keep one GPU busy for the whole time."""

import sys

import gpu


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60, metavar="S", help="duration in seconds")
    options = parser.parse_args()
    device, buffer = gpu.start(options)
    gpu.log("busy", seconds=options.seconds)
    device.compute(options.seconds)
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
