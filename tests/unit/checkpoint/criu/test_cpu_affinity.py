"""Affinities of threads are recorded relative to the CPUs of the job, and restored among those of the new attempt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from namespace_job import Job, needs_root
from waiting import wait_until

from slurm_affinode.base import pidfd
from slurm_affinode.base.pidfd import Id, Process
from slurm_affinode.checkpoint.criu import cpu_affinity
from slurm_affinode.checkpoint.image.criu_images import BadImage

pytestmark = [
    needs_root,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
]
BOUND = """
import os, threading, time
first, *_, last = sorted(os.sched_getaffinity(0))
def bind():
    os.sched_setaffinity(0, {last})
    print("bound", flush=True)
    time.sleep(1000)
threading.Thread(target=bind).start()
"""


@pytest.fixture
def space(tmp_path: Path) -> Iterator[pidfd.Namespace]:
    """Yield the namespace of a job with a process that has a thread bound to the last CPU."""
    job = Job(tmp_path / "log", f"python3 -c '{BOUND}' >>\"$0\"")
    try:
        wait_until("it is bound", lambda: "bound" in (tmp_path / "log").read_text(encoding="utf-8"))
        yield pidfd.namespace(Id(job.init, Process(job.init).started))
    finally:
        job.end()


def masks(space: pidfd.Namespace) -> dict[int, set[int]]:
    """Return the CPUs of each thread."""
    return {
        inner: os.sched_getaffinity(outer)
        for _, process in space.processes()
        for inner, outer in cpu_affinity._threads(process)
    }


def image(directory: Path) -> Any:
    names = [path.name for path in directory.iterdir()]
    return SimpleNamespace(names=lambda: names, read=lambda name: (directory / name).read_bytes())


def test_affinities_are_restored(space: pidfd.Namespace, tmp_path: Path) -> None:
    """Only those of threads that do not use all CPUs of the job are recorded."""
    (made := tmp_path / "image").mkdir()
    before = masks(space)
    fd = os.open(made, os.O_RDONLY)
    cpu_affinity.record(fd, space)
    os.close(fd)
    recorded = cpu_affinity.recorded((made / cpu_affinity.INDEX).read_bytes())
    own_cpus = os.sched_getaffinity(0)
    (bound,) = (thread for thread, cpus in before.items() if cpus != own_cpus)
    assert recorded == {bound: [len(own_cpus) - 1]}
    for _, process in space.processes():
        for _, outer in cpu_affinity._threads(process):
            os.sched_setaffinity(outer, own_cpus)
    cpu_affinity.restore(image(made), space)
    assert masks(space) == before


def test_attempt_with_fewer_cpus_keeps_its_own(
    space: pidfd.Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so."""
    (tmp_path / cpu_affinity.INDEX).write_text('{"1": [1000]}')
    before = masks(space)
    cpu_affinity.restore(image(tmp_path), space)
    assert masks(space) == before
    assert "run on all CPUs" in caplog.text


@pytest.mark.parametrize("text", ["[]", '{"x": [1]}', '{"1": [-1]}', '{"1": "0"}', "{"])
def test_damaged_record_is_refused(text: str) -> None:
    with pytest.raises(BadImage, match=cpu_affinity.INDEX):
        cpu_affinity.recorded(text.encode())
