"""The whole way: off the GPU, dumped to an image on disk, gone; restored in another namespace, back on the GPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu import tree
from gpu.machine import MIB, Machine
from gpu.programs import HERE, Program, Programs, end, ended, looked_after
from gpu.skips import without
from slurm_affinode.checkpoint import namespace
from slurm_affinode.checkpoint.criu import Criu
from slurm_affinode.checkpoint.cuda import Cuda
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CudaState, Tree
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.pinned import Process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]

LARGEST_MIB = 16 * 1024
"""Written, synced, verified and read within the time, also on a disk with 0.2 GB/s."""


@pytest.fixture(scope="session")
def criu(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Criu:
    """A CRIU that can be used here; skips with the reason."""
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


def fitting(machine: Machine, store: DirectoryStore) -> int:
    """GPU memory, in MiB, of which an image fits on the disk; skips where hardly any does."""
    free = store.usage().free // MIB
    mib = min(machine.mib, LARGEST_MIB, (free - machine.besides_mib) // 2)
    if mib < 8:
        store.close()
        where = store.path.parent
        pytest.skip(f"{where} has {free} MiB free, too little for an image: GPU_TEST_STORE names another place")
    return mib


def measured(action: Callable[[], Any]) -> tuple[Any, float]:
    """What it gave, and seconds."""
    began = time.monotonic()
    return action(), time.monotonic() - began


def test_it_is_gone_and_comes_back_from_its_image(  # noqa: PLR0917 - fixtures
    machine: Machine, run: Programs, cuda: Cuda, nvml: NvmlDriver, criu: Criu, store: DirectoryStore, tmp_path: Path,
    note: Any,
) -> None:  # fmt: skip
    """Another process has the GPU while there is only an image; outputs are those of an uninterrupted run."""
    mib = fitting(machine, store)
    calm = run.start()
    calm.ask("setup", mib=mib, seed=9)
    expected = [calm.ask("steps", count=2), calm.ask("steps", count=2), calm.ask("digest")]
    run.close()

    directory = tmp_path / "program"
    directory.mkdir()
    key = JobKey("gpu", 1, 1)
    program = Program(directory)
    try:
        with (
            tree.space(tmp_path, sys.executable, str(HERE / "worker.py"), str(directory)) as first,
            looked_after(cuda, program),
        ):
            program.ready()
            root_ns, program.pid = first.root()
            program.ask("setup", mib=mib, seed=9)
            began_with = program.ask("steps", count=2)
            _, out_s = measured(lambda: run.suspend(program))
            with store.begin(key, uid=0, estimate=mib * MIB) as writer:
                writer.follow()
                dump, dump_s = measured(
                    lambda: criu.dump(Tree(Process(first.init).id, program.pid, root_ns), writer.criu_fd, timeout_s=300)
                )
                image = writer.commit(tree.manifest(key, root_ns, mib))
            os.kill(program.pid, signal.SIGKILL)
        assert ended(program, 30.0)
        assert dump.size >= mib * MIB * 0.9

        other = run.start()
        other.ask("setup", mib=mib, seed=1)
        assert other.ask("steps", count=1)
        run.close()

        with tree.space(tmp_path) as second, looked_after(cuda, program):
            again = store.find(LiveRun(replace(key, submit_epoch=2), 0, 1))
            assert again is not None
            fd = store.open_criu(again)
            with store.verifying(again) as pages:
                _, restore_s = measured(
                    lambda: criu.restore(
                        Process(second.init).id, fd, [], root_pid_ns=root_ns, timeout_s=300, pages=pages
                    )
                )
            os.close(fd)
            program.pid = namespace.members(second.init)[root_ns]
            assert cuda.state(program.pid) is CudaState.CHECKPOINTED
            _, in_s = measured(lambda: run.resume(program))
            found = [began_with, program.ask("steps", count=2), program.ask("digest")]
            end(cuda, program)
            assert ended(program, 60.0)
        assert found == expected
        for name, value in (("gib", mib / 1024), ("image_bytes", image.manifest.size), ("checkpoint_s", out_s),
                            ("dump_s", dump_s), ("restore_s", restore_s), ("resume_s", in_s)):  # fmt: skip
            note(name, round(value, 3))
    finally:
        for image_or_error in store.images():
            if not isinstance(image_or_error, Exception):
                store.remove(image_or_error)
        store.close()


def test_a_process_that_holds_its_gpu_is_not_dumped(
    run: Programs, criu: Criu, cuda: Cuda, store: DirectoryStore, tmp_path: Path
) -> None:
    """CRIU refuses, and the process runs on unharmed."""
    directory = tmp_path / "program"
    directory.mkdir()
    program = Program(directory)
    with (
        tree.space(tmp_path, sys.executable, str(HERE / "worker.py"), str(directory)) as first,
        looked_after(cuda, program),
    ):
        program.ready()
        root_ns, program.pid = first.root()
        program.ask("setup", mib=16, seed=9)
        digest = program.ask("digest")
        with store.begin(JobKey("gpu", 2, 1), uid=0, estimate=MIB) as writer, pytest.raises(Exception, match="CRIU"):
            criu.dump(Tree(Process(first.init).id, program.pid, root_ns), writer.criu_fd, timeout_s=60)
        assert cuda.state(program.pid) is CudaState.RUNNING
        assert program.ask("digest") == digest
        program.send("end")
        assert ended(program, 60.0)
    store.close()
