#!/opt/programs/bin/python
"""Read batches from data loaders of PyTorch while the process holds GPU memory.

There is one loader for each start method of workers, which persist for two epochs. Each batch goes through a pinned
buffer to the GPU and back.
"""

import ctypes
import functools
import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

import gpu
import torch
import torch.multiprocessing
from cuda.bindings import driver
from torch.utils.data import DataLoader, Dataset, Sampler

WIDTH = 1 << 14
BATCH = 2


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random numbers that depend only on the index, with the PID of the process that drew them and its count so far."""

    def __init__(self, length: int) -> None:
        self.length, self.made = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.made += 1
        values = torch.rand(WIDTH, generator=torch.Generator().manual_seed(index))
        return values, torch.tensor([os.getpid(), self.made])


class Shuffled(Sampler[int]):
    """A different order in each epoch, the same in each loader."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Transfer:
    """A pinned host buffer and a GPU buffer, each for one batch."""

    def __init__(self) -> None:
        self.size = BATCH * WIDTH * 4
        self.device = gpu.call(driver.cuMemAlloc, self.size)
        self.address = int(gpu.call(driver.cuMemAllocHost, self.size))
        self.pinned = torch.frombuffer((ctypes.c_char * self.size).from_address(self.address), dtype=torch.float32)

    def digest(self, batch: torch.Tensor) -> str:
        """Return the digest of a batch after its way to the GPU and back."""
        self.pinned.copy_(batch.flatten())
        gpu.call(driver.cuMemcpyHtoD, self.device, self.address, self.size)
        self.pinned.zero_()
        gpu.call(driver.cuMemcpyDtoH, self.address, self.device, self.size)
        return hashlib.sha256(self.pinned.numpy()).hexdigest()


def loader(method: str, length: int, sharing: str) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """Return a loader whose workers are started by this method and share batches with this strategy."""
    return DataLoader(
        Numbers(length), batch_size=BATCH, sampler=Shuffled(length), num_workers=2,
        persistent_workers=True, multiprocessing_context=method, timeout=120,
        worker_init_fn=functools.partial(share, sharing),
    )  # fmt: skip


def share(sharing: str, _: int) -> None:
    """Set the sharing strategy in a worker, which only forked workers inherit."""
    torch.multiprocessing.set_sharing_strategy(sharing)


def expected(length: int, epochs: int) -> Iterator[str]:
    """Yield the digests of all batches, computed in this process alone."""
    alone = DataLoader(Numbers(length), batch_size=BATCH, sampler=Shuffled(length))
    for _ in range(epochs):
        for values, _ in alone:
            yield hashlib.sha256(values.flatten().numpy()).hexdigest()


def main() -> int:
    """Run the workload: each step reads a batch from every loader."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--methods", default="fork,forkserver,spawn", metavar="LIST", help="start methods of workers")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="batches of an epoch")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="number of epochs")
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds between two steps")
    parser.add_argument("--sharing", default="file_descriptor", metavar="STRATEGY", help="sharing strategy of batches")
    options = parser.parse_args()
    torch.multiprocessing.set_sharing_strategy(options.sharing)
    torch.set_num_threads(1)
    device, buffer = gpu.start(options)
    transfer = Transfer()
    length = options.steps * BATCH
    loaders = {method: loader(method, length, options.sharing) for method in options.methods.split(",")}
    seen: dict[str, list[str]] = {method: [] for method in loaders}
    makers: dict[int, int] = {}
    for _ in range(options.epochs):
        for batches in zip(*loaders.values(), strict=True):
            for method, (values, made) in zip(loaders, batches, strict=True):
                seen[method].append(transfer.digest(values))
                for pid, count in made.tolist():
                    makers[pid] = max(count, makers.get(pid, 0))
            gpu.log("step", number=len(seen[method]))
            time.sleep(options.every)
    gpu.log("workers", counts=",".join(str(count) for count in sorted(makers.values())))
    children = [child for child in multiprocessing.active_children() if child.pid in makers]
    loaders.clear()
    for child in children:
        child.join(30)
    gpu.log("exited", codes=",".join(str(child.exitcode) for child in children))
    expected_digests = list(expected(length, options.epochs))
    for method, digests in seen.items():
        gpu.log("sequence", method=method, batches="identical" if digests == expected_digests else "different")
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
