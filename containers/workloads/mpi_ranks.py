#!/opt/programs/bin/python
"""A rank of an MPI program that holds memory of its GPU, and adds up numbers and large messages of all ranks.

Started by mpirun. The sums are compared with those that each rank computes alone.
"""

import os
import sys
import time

import gpu
from mpi4py import MPI

MESSAGE_BYTES = 4 << 20
"""Long enough for the transfer without a copy: ranks read each other's memory."""


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--until", required=True, metavar="FILE", help="compute until this file exists")
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds between two steps")
    options = parser.parse_args()
    ranks = MPI.COMM_WORLD
    rank, size = ranks.Get_rank(), ranks.Get_size()
    device, buffer = gpu.start(options, ordinal=rank)
    received = bytearray(MESSAGE_BYTES)
    same, ended, step = True, False, 0
    while not ended:
        step += 1
        same &= ranks.allreduce(step * (rank + 1)) == step * size * (size + 1) // 2
        sent = bytes([(step + rank) % 256]) * MESSAGE_BYTES
        ranks.Sendrecv(sent, (rank + 1) % size, recvbuf=received, source=(rank - 1) % size)
        same &= received == bytes([(step + (rank - 1) % size) % 256]) * MESSAGE_BYTES
        gpu.log("step", number=step, rank=rank)
        time.sleep(options.every)
        ended = ranks.bcast(os.path.exists(options.until))  # noqa: PTH110 - once a step
    gpu.log("added", rank=rank, sums="identical" if same else "different")
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
