#!/opt/programs/bin/python
"""Run a rank of a data-parallel training with PyTorch on the CPU (backend gloo) while it holds memory of its GPU.

Started by torchrun or accelerate launch. At the end each rank repeats the training of all ranks alone and compares.
"""

import hashlib
import os
import sys
import time

import gpu
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64


def model() -> nn.Module:
    """Return the untrained model, the same for all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def loss(trained: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a rank in a step."""
    batch = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(step * 100 + rank))
    return trained(batch).square().mean()


def digest(trained: nn.Module) -> str:
    """Return the digest of all parameters."""
    digest = hashlib.sha256()
    for parameter in trained.parameters():
        digest.update(parameter.detach().numpy())
    return digest.hexdigest()[:16]


def alone(ranks: int, steps: int) -> str:
    """Return the digest after the same training in this process alone."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss(trained, rank, step) / ranks).backward()
        optimizer.step()
    return digest(trained)


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--accelerate", action="store_true", help="use the library accelerate")
    parser.add_argument("--until", required=True, metavar="FILE", help="train until this file exists")
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds between two steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    device, buffer = gpu.start(options, ordinal=rank)
    distributed.init_process_group("gloo")
    trained: nn.Module = model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    backward = torch.Tensor.backward
    if options.accelerate:
        from accelerate import Accelerator  # noqa: PLC0415 - it takes seconds

        accelerator = Accelerator(cpu=True)
        trained, optimizer = accelerator.prepare(trained, optimizer)
        backward = accelerator.backward
    else:
        trained = DistributedDataParallel(trained)
    ended, step = torch.zeros(1), 0
    while not ended:
        step += 1
        optimizer.zero_grad()
        backward(loss(trained, rank, step))
        optimizer.step()
        gpu.log("step", number=step, rank=rank)
        time.sleep(options.every)
        ended[0] = os.path.exists(options.until)  # noqa: PTH110 - once a step
        distributed.broadcast(ended, 0)
    same = digest(trained) == alone(distributed.get_world_size(), step)
    gpu.log("trained", rank=rank, parameters="identical" if same else "different")
    distributed.destroy_process_group()
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
