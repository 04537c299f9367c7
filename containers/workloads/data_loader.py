#!/opt/slurm-affinode/bin/python
"""Load data with worker processes, as PyTorch's DataLoader does, while the main process holds GPU memory."""

import hashlib
import mmap
import multiprocessing
import sys
import time
from multiprocessing.queues import Queue
from pathlib import Path

import gpu

BATCH = 1 << 16


def load(number: int, requested: Queue, loaded: Queue, shared: mmap.mmap | None) -> None:
    """Load the requested batches in a worker, until ``None`` is requested."""
    count = 0
    while (index := requested.get()) is not None:
        count += 1
        batch = hashlib.sha256(b"%d" % index).digest() * (BATCH // 32)
        if shared is None:
            loaded.put((number, count, index, batch))
        else:
            shared[number * BATCH : (number + 1) * BATCH] = batch
            loaded.put((number, count, index, None))


def main() -> int:
    """Run the workload: each step requests a batch from every worker."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of worker processes")
    parser.add_argument(
        "--method", choices=multiprocessing.get_all_start_methods(), default="fork", help="start method"
    )
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="number of batches from each worker")
    parser.add_argument("--until", type=Path, metavar="FILE", help="load until this file exists")
    parser.add_argument("--every", type=float, default=1, metavar="S", help="seconds between two steps")
    options = parser.parse_args()
    device, buffer = gpu.start(options)
    context = multiprocessing.get_context(options.method)
    shared = mmap.mmap(-1, options.workers * BATCH) if options.method == "fork" else None
    requested = [context.Queue() for _ in range(options.workers)]
    loaded = context.Queue()
    workers = [
        context.Process(target=load, args=(number, requested[number], loaded, shared))
        for number in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    gpu.log("workers", pids=",".join(str(worker.pid) for worker in workers))
    counts = {}
    for step in gpu.steps(options.steps, options.until):
        for number, queue in enumerate(requested):
            queue.put(step * options.workers + number)
        for _ in workers:
            number, count, index, batch = loaded.get()
            rows = batch if shared is None else shared[number * BATCH : (number + 1) * BATCH]
            if rows[:32] != hashlib.sha256(b"%d" % index).digest() or count != step:
                gpu.log("end", worker=number, batch="damaged")
                return 9
            counts[number] = count
        gpu.log("step", number=step, counts=",".join(str(counts[number]) for number in sorted(counts)))
        time.sleep(options.every)
    for queue in requested:
        queue.put(None)
    for worker in workers:
        worker.join()
    gpu.log("exited", codes=",".join(str(worker.exitcode) for worker in workers))
    return max([gpu.finish(device, buffer), *(abs(worker.exitcode or 0) for worker in workers)])


if __name__ == "__main__":
    sys.exit(main())
