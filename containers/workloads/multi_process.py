#!/opt/slurm-affinode/bin/python
"""Run several processes on the job's GPUs, as in data-parallel training: busy, then idle, then busy again."""

import argparse
import multiprocessing
import sys
import time

import gpu


def worker(rank: int, options: argparse.Namespace) -> None:
    """Run one rank on the GPU with its number modulo the number of GPUs."""
    device, buffer = gpu.start(options, ordinal=rank % options.gpus)
    gpu.log("busy", rank=rank, seconds=options.busy)
    device.compute(options.busy)
    gpu.log("idle", rank=rank, seconds=options.idle)
    time.sleep(options.idle)
    device.compute(options.again)
    sys.exit(gpu.finish(device, buffer))


def main() -> int:
    """Run the workload. Ranks are spawned, because CUDA does not survive a fork."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="number of processes")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs to spread them over")
    parser.add_argument("--busy", type=float, default=10, metavar="S", help="seconds of computing at the start")
    parser.add_argument("--idle", type=float, default=0, metavar="S", help="seconds of idling after it")
    parser.add_argument("--again", type=float, default=1, metavar="S", help="seconds of computing at the end")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=worker, args=(rank, options)) for rank in range(options.processes)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
