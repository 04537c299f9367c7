"""Driver 615: GPU memory goes to files that we write, and comes back from them."""

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
    """A node with that driver."""
    node.ctl("driver", VERSION)
    made = Cuda(driver_version=lambda: VERSION, env=node.env)
    yield made
    made.close()


def user_of(node: Node, ordinal: int = 0) -> tuple[Program, list[str]]:
    """A program with two allocations; their digests."""
    user = node.user(ordinal)
    user.do("a, b = alloc(70), alloc(3)")
    return user, [user.get("fill(a, 70 * MIB, 1)"), user.get("fill(b, 3 * MIB, 2)")]


def digests(user: Program) -> list[str]:
    """What they hold now."""
    return [user.get("digest(a, 70 * MIB)"), user.get("digest(b, 3 * MIB)")]


def free(node: Node) -> bool:
    """No process holds a GPU."""
    return not any(gpu["processes"] for gpu in node.show()["gpus"])


def test_memory_goes_to_a_file_and_comes_back(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """It is in the file and neither on the GPU nor in the process; no context of ours is left on the GPU."""
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
        cuda.restore(user.pid)  # there is nothing in its host memory
    cuda.restore_from(user.pid, tmp_path, stored)
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written
    assert user.get("resident('VmRSS')") < before + 40 * MIB


def test_it_comes_back_on_another_gpu(cuda: Cuda, node: Node, tmp_path: Path) -> None:
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


def test_without_room_nothing_begins(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """The process is locked as before and goes on; no file is left."""
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


def test_a_file_that_is_not_whole_is_refused_before_the_driver_is_asked(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """And the process can still come back from the right one."""
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


def test_older_drivers_are_refused_by_name(node: Node, tmp_path: Path) -> None:
    """Nothing is asked of them."""
    cuda = Cuda(driver_version=lambda: "580.95.05", env=node.env)
    with pytest.raises(CudaUnavailable, match=r"^custom storage: driver 580\.95\.05 has no .* \(615 has it\)$"):
        cuda.checkpoint_to(1, tmp_path, held={})
    with pytest.raises(CudaUnavailable, match=r"^custom storage"):
        cuda.restore_from(1, tmp_path, ())
    cuda.close()


def test_the_driver_wants_contexts_on_the_gpus_of_the_process(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """A GPU that was not named: refused by the driver, and the process is locked as before."""
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


def test_blocks_that_cannot_be_written_put_the_process_back(cuda: Cuda, node: Node, tmp_path: Path) -> None:
    """What is mapped has to be completed; so it comes back from what could be kept, and nothing is lost."""
    user, written = user_of(node)
    cuda.lock(user.pid, timeout_ms=5000)
    broken = node.start()
    broken.do(FAILING)
    uuid = cuda.devices()[0]
    with pytest.raises(DriverError, match="1 blocks could not be written; the process was put back"):
        broken.do(f"storage.out({user.pid}, {str(tmp_path)!r}, {{{uuid!r}: {73 * MIB}}})")
    assert not list(tmp_path.iterdir())
    assert cuda.state(user.pid) is CudaState.LOCKED
    cuda.unlock(user.pid)
    assert digests(user) == written
