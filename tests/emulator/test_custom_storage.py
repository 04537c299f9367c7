"""Driver 615: ``benchmarks/gpu/custom_storage.py`` writes GPU memory to files, and restores it from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from emulator.node import DriverError, Node, Program

from benchmarks.gpu import measure
from benchmarks.gpu.custom_storage import Storage
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.cuda.driver import Driver
from slurm_affinode.checkpoint.interface import CudaError, CudaState

VERSION = "615.71.05"
MIB = 1 << 20
SETUP = """
from benchmarks.gpu import custom_storage
from slurm_affinode.checkpoint.cuda.driver import Driver
storage = custom_storage.Storage(Driver())
"""


@pytest.fixture
def cuda(node: Node) -> Iterator[Cuda]:
    """The driver of a node with that version."""
    node.ctl("driver", VERSION)
    made = Cuda(driver_version=lambda: VERSION, env=node.env)
    yield made
    made.close()


class Custom:
    """A program with a ``Storage`` for one directory."""

    def __init__(self, node: Node, directory: Path) -> None:
        self.program = node.start(PYTHONPATH=os.pathsep.join(sys.path))
        self.program.do(SETUP)
        self._directory = str(directory)

    def checkpoint(self, pid: int, held: dict[str, int]) -> list[dict[str, Any]]:
        """Write a process's memory to files, and return them."""
        stored: list[dict[str, Any]] = self.program.get(f"storage.checkpoint({pid}, {self._directory!r}, {held!r})")
        return stored

    def restore(self, pid: int, stored: list[dict[str, Any]], pairs: dict[str, str] | None = None) -> None:
        """Restore a process from these files."""
        self.program.do(f"storage.restore({pid}, {self._directory!r}, {stored!r}, {pairs!r})")


@pytest.fixture
def custom(cuda: Cuda, node: Node, tmp_path: Path) -> Custom:
    """A program that stores memory in ``tmp_path``."""
    return Custom(node, tmp_path)


def user_of(node: Node, ordinal: int = 0) -> tuple[Program, list[str]]:
    """Start a program with two allocations; return it with their digests."""
    user = node.user(ordinal)
    user.do("a, b = alloc(70), alloc(3)")
    return user, [user.get("fill(a, 70 * MIB, 1)"), user.get("fill(b, 3 * MIB, 2)")]


def digests(user: Program) -> list[str]:
    """Return the current digests of both allocations."""
    return [user.get("digest(a, 70 * MIB)"), user.get("digest(b, 3 * MIB)")]


def free(node: Node) -> bool:
    """Return whether no process holds a GPU."""
    return not any(gpu["processes"] for gpu in node.show()["gpus"])


def test_memory_is_written_to_file_and_restored(cuda: Cuda, custom: Custom, node: Node, tmp_path: Path) -> None:
    """The memory is in the file, not on the GPU or in the process; the storing program keeps no context on the GPU."""
    user, written = user_of(node)
    before = user.get("resident('VmRSS')")
    cuda.lock(user.pid, timeout_ms=5000)
    stored = custom.checkpoint(user.pid, {cuda.devices()[0]: 200 * MIB})
    assert cuda.state(user.pid) is CudaState.CHECKPOINTED
    assert free(node)
    assert [item["size"] for item in stored] == [73 * MIB]
    file = tmp_path / stored[0]["file"]
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (73 * MIB, 0o600)
    with pytest.raises(CudaError):
        cuda.restore(user.pid)  # its host memory does not contain the data
    custom.restore(user.pid, stored)
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written
    assert user.get("resident('VmRSS')") < before + 40 * MIB


def test_memory_is_restored_on_another_gpu(cuda: Cuda, custom: Custom, node: Node) -> None:
    """By pairs. The storing program keeps its context there until it ends."""
    user, written = user_of(node)
    first, second = cuda.devices()
    cuda.lock(user.pid, timeout_ms=5000)
    stored = custom.checkpoint(user.pid, {first: 73 * MIB})
    custom.restore(user.pid, stored, {first: second, second: first})
    cuda.unlock(user.pid)
    assert [len(gpu["processes"]) for gpu in node.show()["gpus"]] == [0, 2]
    custom.program.kill()
    assert [len(gpu["processes"]) for gpu in node.show()["gpus"]] == [0, 1]
    assert digests(user) == written


def test_full_disk_is_reported_without_side_effects(cuda: Cuda, custom: Custom, node: Node, tmp_path: Path) -> None:
    """The process stays locked and can continue; no file is left."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    with pytest.raises(DriverError, match=r"StorageError: /.*: cannot reserve \d+ bytes"):
        custom.checkpoint(user.pid, {cuda.devices()[0]: 1 << 50})
    with pytest.raises(DriverError, match="No such file"):
        Custom(node, tmp_path / "absent").checkpoint(user.pid, {cuda.devices()[0]: 1})
    assert not list(tmp_path.iterdir())
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written


def test_truncated_file_is_rejected(cuda: Cuda, custom: Custom, node: Node, tmp_path: Path) -> None:
    """The process can still be restored from the correct file."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    stored = custom.checkpoint(user.pid, {cuda.devices()[0]: 73 * MIB})
    file = tmp_path / stored[0]["file"]
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DriverError, match="has the wrong size"):
        custom.restore(user.pid, stored)
    assert cuda.state(user.pid) is CudaState.CHECKPOINTED
    file.write_bytes(content)
    custom.restore(user.pid, stored)
    cuda.unlock(user.pid)
    assert digests(user) == written


def test_older_drivers_are_rejected(node: Node, tmp_path: Path) -> None:
    """The benchmark reports the feature, and starts no program."""
    cuda = Cuda(driver_version=lambda: "580.95.05", env=node.env)
    run = Mock()
    why = measure.stored(run, measure.Product(cuda, Mock()), 1, tmp_path, 1)
    assert why == "custom storage: driver 580.95.05 has no cuCheckpointOperationComplete (615 has it)"
    assert run.mock_calls == []
    cuda.close()


def test_missing_context_is_reported_by_driver(cuda: Cuda, custom: Custom, node: Node, tmp_path: Path) -> None:
    """If a GPU is not named, the driver returns an error, and the process stays locked."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        custom.checkpoint(user.pid, {cuda.devices()[1]: MIB})
    assert not list(tmp_path.iterdir())
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written


FAILING = """
def fails(descriptor, data, offset, whole=custom_storage._write_all):
    if offset > 0:
        raise OSError(5, "Input/output error")
    whole(descriptor, data, offset)
custom_storage._write_all = fails
"""


def test_write_error_rolls_back(cuda: Cuda, custom: Custom, node: Node, tmp_path: Path) -> None:
    """A checkpoint must be completed; so the process is restored from the blocks in memory, without loss."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    custom.program.do(FAILING)
    with pytest.raises(DriverError, match="1 blocks could not be written; the process was restored"):
        custom.checkpoint(user.pid, {cuda.devices()[0]: 73 * MIB})
    assert not list(tmp_path.iterdir())
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written


class Code(Enum):
    """``CUresult``."""

    CUDA_SUCCESS = 0


class Attribute(Enum):
    """``CUpointer_attribute``."""

    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


class Bindings:
    """A driver with streams 70 and 71 in the contexts of GPUs 0 and 1; the emulated driver is simpler."""

    CUresult, CUpointer_attribute = Code, Attribute
    current: int | None = None

    def cuStreamGetCtx(self, stream: int) -> Any:
        return Code.CUDA_SUCCESS, stream + 100

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.current = context
        return (Code.CUDA_SUCCESS,)

    def cuCtxGetDevice(self) -> Any:
        assert self.current is not None
        return Code.CUDA_SUCCESS, self.current - 170

    def cuPointerGetAttribute(self, attribute: Attribute, at: int) -> Any:
        return Code.CUDA_SUCCESS, at >> 40


def test_gpu_is_found_from_the_stream_or_the_address() -> None:
    """The address is used for the default stream, as in the description of the driver's API."""
    storage = object.__new__(Storage)  # no ring of host memory
    storage._driver = Driver(Bindings())
    assert [storage._ordinal(stream, 0) for stream in (70, 71)] == [0, 1]
    assert storage._ordinal(0, 3 << 40) == 3
