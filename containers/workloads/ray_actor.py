#!/opt/programs/bin/python
"""Run Ray on one node: tasks load batches into its object store, and an actor that holds GPU memory trains on them.

At the end it repeats the training alone and compares, and starts another actor, which needs another worker process.
"""

import hashlib
import os
import sys
import time

import gpu
import ray

OBJECT_BYTES = 16 << 20
"""Size of an object; Ray copies objects above 100 KiB into its object store."""


def batch(step: int) -> bytes:
    """Return the batch of a step."""
    return hashlib.sha256(b"%d" % step).digest() * (1 << 15)


def trained(state: bytes, parameters: bytes, loaded: bytes) -> bytes:
    """Return the state after a step of the training."""
    return hashlib.sha256(state + parameters + loaded).digest()


@ray.remote(num_cpus=1)
def load(step: int) -> bytes:
    """Load the batch of a step into the object store, as a task."""
    return batch(step)


@ray.remote(num_cpus=1, num_gpus=1)
class Trainer:
    """An actor with a state and GPU memory."""

    def __init__(self, memory_mib: int) -> None:
        """Allocate the GPU memory."""
        self._gpu = gpu.Gpu()
        self._buffer = self._gpu.hold(memory_mib * gpu.MIB, seed=os.getpid())
        self._state = b""

    def start(self) -> str:
        """Return the ID of the GPU."""
        return self._gpu.uuid

    def train(self, parameters: bytes, loaded: bytes) -> bytes:
        """Train on a batch; return the state."""
        self._gpu.activate()
        self._gpu.compute(0.02)
        self._state = trained(self._state, parameters, loaded)
        return self._state

    def intact(self) -> bool:
        """Return whether the GPU memory still contains its pattern."""
        self._gpu.activate()
        return self._gpu.intact(self._buffer)


@ray.remote(num_cpus=0)
class Reader:
    """An actor that is started after the training."""

    def digest(self, value: bytes) -> bytes:
        """Return the digest of an object."""
        return hashlib.sha256(value).digest()


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--until", required=True, metavar="FILE", help="train until this file exists")
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds between two steps")
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, num_gpus=1, object_store_memory=100 << 20, include_dashboard=False)
    parameters = os.urandom(OBJECT_BYTES)
    stored = ray.put(parameters)
    trainer = Trainer.remote(options.memory_mib)
    gpu.log("start", gpu=ray.get(trainer.start.remote()), memory_mib=options.memory_mib)
    step, state = 0, b""
    while not os.path.exists(options.until):  # noqa: PTH110 - once a step
        step += 1
        state = ray.get(trainer.train.remote(stored, load.remote(step)))
        gpu.log("step", number=step, clock=f"{time.monotonic():.3f}")
        time.sleep(options.every)
    expected = b""
    for number in range(1, step + 1):
        expected = trained(expected, parameters, batch(number))
    gpu.log("trained", state="identical" if state == expected else "different")
    intact = ray.get(Reader.remote().digest.remote(stored)) == hashlib.sha256(parameters).digest()
    gpu.log("read", object="identical" if intact else "different")
    intact = ray.get(trainer.intact.remote())
    gpu.log("end", memory="intact" if intact else "damaged")
    ray.shutdown()
    return 0 if intact else 9


if __name__ == "__main__":
    sys.exit(main())
