"""The whole cycle: checkpoint the GPU memory, dump to disk, kill; restore in another namespace and on the GPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu import tree
from gpu.machine import MIB, Machine
from gpu.programs import HERE, Program, Programs, end, ended, looked_after
from gpu.skips import without
from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.interface import CudaState
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.suspension import JobKey, LiveRun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]

LARGEST_MIB = 16 * 1024
"""Can be written, synced, verified and read within the time limit, even on a disk with 0.2 GB/s."""


@pytest.fixture(scope="session")
def criu(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Criu:
    """A usable CRIU; skips with the reason."""
    why = tree.can()
    if why is not None:
        pytest.skip(why)
    if machine.no_criu is not None:
        without(machine.no_criu)
    assert machine.criu is not None
    criu = Criu(program=machine.criu)
    if (why := tree.trial(criu, tmp_path_factory.mktemp("trial"))) is not None:
        pytest.skip(why)
    return criu


@pytest.fixture
def store(machine: Machine, tmp_path: Path) -> DirectoryStore:
    """An image store on disk; ``GPU_TEST_STORE`` names another directory."""
    base = Path(os.environ.get("GPU_TEST_STORE", tmp_path))
    return DirectoryStore(base / f"images-{os.getpid()}", os.urandom(32))


@pytest.fixture
def program() -> Iterator[Program]:
    """A program to be started with this directory as the owner of a job."""
    with tree.directory() as directory:
        yield Program(directory)


def fitting(machine: Machine, store: DirectoryStore) -> int:
    """Return the GPU memory in MiB that fits on the disk as an image; skips if there is almost no space."""
    free = store.usage().free // MIB
    mib = min(machine.mib, LARGEST_MIB, (free - machine.besides_mib) // 2)
    if mib < 8:
        store.close()
        where = store.path.parent
        pytest.skip(f"{where} has {free} MiB free, too little for an image: GPU_TEST_STORE names another place")
    return mib


def measured(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of an action and its duration in seconds."""
    began = time.monotonic()
    return action(), time.monotonic() - began


def test_process_is_restored_from_image(  # noqa: PLR0917 - fixtures
    machine: Machine, run: Programs, cuda: Cuda, nvml: NvmlDriver, criu: Criu, store: DirectoryStore, tmp_path: Path,
    program: Program, note: Any,
) -> None:  # fmt: skip
    """Another process uses the GPU meanwhile; the outputs are those of an uninterrupted run."""
    mib = fitting(machine, store)
    calm = run.start()
    calm.ask("setup", mib=mib, seed=9)
    expected = [calm.ask("steps", count=2), calm.ask("steps", count=2), calm.ask("digest")]
    run.close()

    key, directory = JobKey("gpu", 1, 1), str(program.directory)
    try:
        with (
            tree.space(tmp_path, sys.executable, str(HERE / "worker.py"), directory, owner=tree.OWNER) as first,
            looked_after(cuda, program),
        ):
            program.ready()
            root_ns, program.pid = first.root()
            program.ask("setup", mib=mib, seed=9)
            began_with = program.ask("steps", count=2)
            _, out_s = measured(lambda: run.suspend(program))
            with store.begin(key, uid=tree.OWNER.uid, estimate=mib * MIB) as writer:
                writer.follow()
                _, dump_s = measured(lambda: tree.dump(criu, first, writer.criu_fd, timeout_s=300))
                image = writer.commit(tree.manifest(key, root_ns, mib))
            os.kill(program.pid, signal.SIGKILL)
        assert ended(program, 30.0)
        assert image.manifest.size >= mib * MIB * 0.9

        other = run.start()
        other.ask("setup", mib=mib, seed=1)
        assert other.ask("steps", count=1)
        run.close()

        with tree.space(tmp_path, owner=tree.OWNER) as second, looked_after(cuda, program):
            again = store.find(LiveRun(replace(key, submit_epoch=2), tree.OWNER.uid, 1))
            assert again is not None
            fd = store.open_criu(again)
            with store.verifying(again) as pages:
                _, restore_s = measured(
                    lambda: criu.restore(
                        Process(second.init).id,
                        fd,
                        [],
                        root_pid_ns=root_ns,
                        timeout_s=300,
                        pages=pages,
                        user=tree.OWNER,
                    )
                )
            os.close(fd)
            program.pid = second.members()[root_ns]
            assert cuda.state(program.pid) is CudaState.CHECKPOINTED
            _, in_s = measured(lambda: run.resume(program))
            result = [began_with, program.ask("steps", count=2), program.ask("digest")]
            end(cuda, program)
            assert ended(program, 60.0)
        assert result == expected
        for name, value in (("gib", mib / 1024), ("image_bytes", image.manifest.size), ("checkpoint_s", out_s),
                            ("dump_s", dump_s), ("restore_s", restore_s), ("resume_s", in_s)):  # fmt: skip
            note(name, round(value, 3))
    finally:
        for image_or_error in store.images():
            if not isinstance(image_or_error, Exception):
                store.remove(image_or_error)
        store.close()


def test_process_that_holds_gpu_is_not_dumped(  # noqa: PLR0917 - fixtures
    run: Programs, criu: Criu, cuda: Cuda, store: DirectoryStore, tmp_path: Path, program: Program
) -> None:
    """CRIU refuses, and the process keeps running."""
    directory = str(program.directory)
    with (
        tree.space(tmp_path, sys.executable, str(HERE / "worker.py"), directory, owner=tree.OWNER) as first,
        looked_after(cuda, program),
    ):
        program.ready()
        _, program.pid = first.root()
        program.ask("setup", mib=16, seed=9)
        digest = program.ask("digest")
        key = JobKey("gpu", 2, 1)
        with store.begin(key, uid=tree.OWNER.uid, estimate=MIB) as writer, pytest.raises(Exception, match="CRIU"):
            tree.dump(criu, first, writer.criu_fd, timeout_s=60)
        assert cuda.state(program.pid) is CudaState.RUNNING
        assert program.ask("digest") == digest
        program.send("end")
        assert ended(program, 60.0)
    store.close()
