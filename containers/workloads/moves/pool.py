#!/usr/bin/python3
"""multiprocessing: a pool, a queue with data in it, a lock that is held, a manager, and shared memory."""

import multiprocessing
from multiprocessing.shared_memory import SharedMemory

from moving import require, run, same

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue, lock, manager = context.Queue(), context.Lock(), context.Manager()
    shared = SharedMemory(create=True, size=1 << 20)
    shared.buf[:] = bytes(range(256)) * 4096
    counts = manager.dict(count=0)
    lock.acquire()
    queue.put("waiting")
    numbers = 0
    with context.Pool(3) as pool:
        workers = {worker.pid for worker in pool._pool}

        def check():
            global numbers
            same(pool.map(abs, range(-50, 0)), list(range(50, 0, -1)), "results of the pool")
            same({worker.pid for worker in pool._pool}, workers, "the workers")
            same(queue.get(timeout=30), "waiting", "the queue")
            queue.put("waiting")
            require(not lock.acquire(block=False), "the lock is free")
            same(counts["count"], numbers, "the manager's table")
            numbers += 1
            counts["count"] = numbers
            same(bytes(shared.buf), bytes(range(256)) * 4096, "shared memory")

        run(check)
    shared.close()
    shared.unlink()
