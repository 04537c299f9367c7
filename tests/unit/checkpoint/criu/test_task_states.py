"""Processes that the agent has stopped for a dump run after the restore; those that were stopped before do not."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.criu import sessions
from slurm_affinode.checkpoint.image.criu_images import BadImage, image_records, integer, message

from .. import criu_files

ALIVE, STOPPED, ZOMBIE = 1, 3, 6
EXITED, CHILD_STOPPED, CHILD_CONTINUED = 1, 5, 6
"""Codes of SIGCHLD."""


@pytest.fixture
def image(tmp_path: Path) -> Iterator[int]:
    for pid, state in ((7, STOPPED), (8, STOPPED), (9, ALIVE)):
        task = criu_files.message((1, state), (2, 0), (6, b"sleep"))
        body = criu_files.message((1, 1), (3, task), (5, criu_files.message((4, 1 << 40))))
        (tmp_path / f"core-{pid}.img").write_bytes(criu_files.image(body))
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def state(image: int, pid: int) -> int:
    """Return the state of a process in the image."""
    task = next(image_records(image, f"core-{pid}.img"))[3][0]
    assert isinstance(task, bytes)
    return integer(message(task), 1)


def test_processes_stopped_for_the_dump_run_after_the_restore(image: int, tmp_path: Path) -> None:
    """Nothing else in their files changes."""
    untouched = [(tmp_path / f"core-{pid}.img").read_bytes() for pid in (8, 9)]
    before = next(image_records(image, "core-7.img"))
    sessions.resume(image, (7, 8, 9), but={8})
    assert [state(image, pid) for pid in (7, 8, 9)] == [ALIVE, STOPPED, ALIVE]
    assert [(tmp_path / f"core-{pid}.img").read_bytes() for pid in (8, 9)] == untouched
    after = next(image_records(image, "core-7.img"))
    assert {key: value for key, value in before.items() if key != 3} == {
        key: value for key, value in after.items() if key != 3
    }
    assert message(after[3][0])[6] == [b"sleep"]  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["core-7.img", "core-8.img", "core-9.img"]


@pytest.mark.parametrize("fields", [(), ((3, b""), (3, b"")), ((3, 5),)], ids=["none", "two", "a number"])
def test_process_without_a_single_description_is_refused(
    image: int, tmp_path: Path, fields: tuple[criu_files.Field, ...]
) -> None:
    (tmp_path / "core-7.img").write_bytes(criu_files.image(criu_files.message((1, 1), *fields)))
    with pytest.raises(BadImage, match=r"core-7\.img: a process is described twice, or not at all"):
        sessions.resume(image, (7,), but=())


def pending(number: int, code: int, child: int, status: int) -> criu_files.Field:
    """Return a pending signal of a child: 128 bytes, as the kernel writes them."""
    info = struct.pack("=iii4xiIi", number, 0, code, child, 1000, status) + b"rest".ljust(100, b"\0")
    return 1, criu_files.message((1, info))


def signals(image: int, pid: int) -> list[bytes]:
    """Return the pending signals of a process in the image."""
    task = next(image_records(image, f"core-{pid}.img"))[3][0]
    assert isinstance(task, bytes)
    queue = message(task)[10][0]
    assert isinstance(queue, bytes)
    return [info for entry in message(queue)[1] for info in message(entry)[1]]  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("state_before", [STOPPED, ALIVE])
def test_parents_do_not_learn_that_their_children_were_stopped_for_the_dump(
    image: int, tmp_path: Path, state_before: int
) -> None:
    """script(1) would stop itself. Process 8 was stopped before, and its parent still learns of that."""
    stop, resume = int(signal.SIGSTOP), int(signal.SIGCONT)
    queue = [
        pending(signal.SIGCHLD, CHILD_STOPPED, 9, stop), pending(signal.SIGCHLD, CHILD_STOPPED, 8, stop),
        pending(signal.SIGCHLD, EXITED, 9, 3), pending(signal.SIGUSR1, CHILD_STOPPED, 9, stop),
    ]  # fmt: skip
    task = criu_files.message((1, state_before), (6, b"script"), (10, criu_files.message(*queue)), (13, 5))
    (tmp_path / "core-7.img").write_bytes(criu_files.image(criu_files.message((1, 1), (3, task))))
    before = signals(image, 7)
    sessions.resume(image, (7, 8, 9), but={8})
    assert state(image, 7) == ALIVE
    continued = pending(signal.SIGCHLD, CHILD_CONTINUED, 9, resume)[1]
    assert isinstance(continued, bytes)
    assert signals(image, 7) == [*message(continued)[1], *before[1:]]


@pytest.mark.parametrize("entry", [b"", criu_files.message((1, b"short")), criu_files.message((1, 5))])
def test_incomplete_pending_signal_is_refused(image: int, tmp_path: Path, entry: bytes) -> None:
    task = criu_files.message((1, ALIVE), (10, criu_files.message((1, entry))))
    (tmp_path / "core-7.img").write_bytes(criu_files.image(criu_files.message((1, 1), (3, task))))
    with pytest.raises(BadImage):
        sessions.resume(image, (7,), but=())
