#!/opt/slurm-affinode/bin/python
"""Allocate device memory until none is left, and exit with an error and status 1, as programs do then."""

import sys

import gpu
from cuda.bindings import driver


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--step-mib", type=int, default=4096, metavar="N", help="size of each allocation")
    parser.add_argument("--compute", type=float, default=0.2, metavar="S", help="seconds of computing after each step")
    options = parser.parse_args()
    device, _buffer = gpu.start(options)
    held_mib = options.memory_mib
    try:
        while True:
            device.hold(options.step_mib * gpu.MIB)
            held_mib += options.step_mib
            device.compute(options.compute)
    except gpu.CudaError as error:
        gpu.log("failed", held_mib=held_mib, error=error.code.name)
        if error.code != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise
        sys.stderr.write("CUDA out of memory\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
