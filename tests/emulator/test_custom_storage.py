"""Driver 615: GPU memory is written to files of slurm-affinode, and restored from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulator.node import DriverError, Node, Program

from slurm_affinode.checkpoint.cuda import Cuda
from slurm_affinode.checkpoint.interface import CudaError, CudaState, CudaUnavailable

VERSION = "615.71.05"
MIB = 1 << 20


@pytest.fixture
def cuda(node: Node) -> Iterator[Cuda]:
    """The driver of a node with that version."""
    node.ctl("driver", VERSION)
    made = Cuda(driver_version=lambda: VERSION, env=node.env)
    yield made
    made.close()


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


def test_memory_is_written_to_file_and_restored(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """The memory is in the file, not on the GPU or in the process; no context of the helper is left on the GPU."""
    user, written = user_of(node)
    before = user.get("resident('VmRSS')")
    cuda.lock(user.pid, timeout_ms=5000)
    stored = cuda.checkpoint_to(user.pid, tmp_path, held={cuda.devices()[0]: 200 * MIB})
    assert cuda.state(user.pid) is CudaState.CHECKPOINTED
    assert free(node)
    assert [one.size for one in stored] == [73 * MIB]
    file = tmp_path / stored[0].file
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (73 * MIB, 0o600)
    with pytest.raises(CudaError):
        cuda.restore(user.pid)  # its host memory does not contain the data
    cuda.restore_from(user.pid, tmp_path, stored)
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written
    assert user.get("resident('VmRSS')") < before + 40 * MIB


def test_memory_is_restored_on_another_gpu(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """By pairs. The helper keeps its context there until it ends."""
    user, written = user_of(node)
    first, second = cuda.devices()
    cuda.lock(user.pid, timeout_ms=5000)
    stored = cuda.checkpoint_to(user.pid, tmp_path, held={first: 73 * MIB})
    cuda.restore_from(user.pid, tmp_path, stored, pairs={first: second, second: first})
    cuda.unlock(user.pid)
    assert [len(gpu["processes"]) for gpu in node.show()["gpus"]] == [0, 2]
    cuda.close()
    assert [len(gpu["processes"]) for gpu in node.show()["gpus"]] == [0, 1]
    assert digests(user) == written


def test_full_disk_is_reported_without_side_effects(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """The process stays locked and can continue; no file is left."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    with pytest.raises(CudaUnavailable, match=r"cannot move .* to /.*: /.*: cannot be made with \d+ bytes"):
        cuda.checkpoint_to(user.pid, tmp_path, held={cuda.devices()[0]: 1 << 50})
    with pytest.raises(CudaUnavailable, match="No such file"):
        cuda.checkpoint_to(user.pid, tmp_path / "absent", held={cuda.devices()[0]: 1})
    assert not list(tmp_path.iterdir())
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written


def test_truncated_file_is_rejected(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """The process can still be restored from the correct file."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    stored = cuda.checkpoint_to(user.pid, tmp_path, held={cuda.devices()[0]: 73 * MIB})
    file = tmp_path / stored[0].file
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CudaUnavailable, match="has not the size"):
        cuda.restore_from(user.pid, tmp_path, stored)
    assert cuda.state(user.pid) is CudaState.CHECKPOINTED
    file.write_bytes(content)
    cuda.restore_from(user.pid, tmp_path, stored)
    cuda.unlock(user.pid)
    assert digests(user) == written


def test_older_drivers_are_rejected(node: Node, tmp_path: Path) -> None:
    """The driver is not called."""
    cuda = Cuda(driver_version=lambda: "580.95.05", env=node.env)
    with pytest.raises(CudaUnavailable, match=r"^custom storage: driver 580\.95\.05 has no .* \(615 has it\)$"):
        cuda.checkpoint_to(1, tmp_path, held={})
    with pytest.raises(CudaUnavailable, match=r"^custom storage"):
        cuda.restore_from(1, tmp_path, ())
    cuda.close()


def test_missing_context_is_reported_by_driver(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """If a GPU is not named, the driver returns an error, and the process stays locked."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
        cuda.checkpoint_to(user.pid, tmp_path, held={cuda.devices()[1]: MIB})
    assert not list(tmp_path.iterdir())
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written


FAILING = """
from slurm_affinode.checkpoint import cuda_driver, cuda_storage
def fails(descriptor, data, offset, whole=cuda_storage._write_all):
    if offset > 0:
        raise OSError(5, "Input/output error")
    whole(descriptor, data, offset)
cuda_storage._write_all = fails
driver = cuda_driver.Driver()
storage = cuda_storage.storage_of(driver)
"""


def test_write_error_rolls_back(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """A checkpoint must be completed; so the process is restored from the blocks in memory, without loss."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    broken = node.start()
    broken.do(FAILING)
    uuid = cuda.devices()[0]
    with pytest.raises(DriverError, match="1 blocks could not be written; the process was restored"):
        broken.do(f"storage.out({user.pid}, {str(tmp_path)!r}, {{{uuid!r}: {73 * MIB}}})")
    assert not list(tmp_path.iterdir())
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written
