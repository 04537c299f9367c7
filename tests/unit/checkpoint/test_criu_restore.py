"""A tree that CRIU restores is let go when its image is verified; of what has gone wrong the first thing is said."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.checkpoint import criu, namespace
from slurm_affinode.checkpoint.criu import Criu
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged, RestoreFailed, Sound
from slurm_affinode.errors import UnreachableError
from slurm_affinode.process import Completed

from .test_criu import make_image

ROOT = 7
Log = list[str]


class Program:
    """CRIU: restores, asks by its script, and lets the tree go unless that was killed meanwhile."""

    def __init__(self, log: Log, *, fails: bool = False, hangs: bool = False) -> None:
        self.log, self.fails, self.hangs = log, fails, hangs

    def __call__(self, argv: Sequence[str], **options: Any) -> Completed:
        """In place of ``process.run``."""
        argv = tuple(argv)
        if "--version" in argv:
            return Completed(argv, 0, b"Version: 4.1.1\n", "")
        if "restore" not in argv:
            return Completed(argv, 0, b"", "")
        self.log.append("criu")
        if self.fails:
            return Completed(argv, 1, b"", "File a has bad size")
        if self.hangs:
            raise UnreachableError("nsenter: no answer within 5 s")
        work = Path(next(word for word in argv if word.startswith("--work-dir=")).partition("=")[2]).readlink()
        gate = next(word for word in argv if word.startswith("--action-script=")).partition("=")[2]
        subprocess.run([gate], cwd=work, env={"CRTOOLS_SCRIPT_ACTION": "pre-resume"}, timeout=60, check=True)
        if "killed" in self.log:
            return Completed(argv, 1, b"", "the tree is gone")
        self.log.append("let go")
        (work / "pid").write_text(str(ROOT))
        return Completed(argv, 0, b"", "")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What happens, in its order; there is no namespace."""
    happened: Log = []
    monkeypatch.setattr(namespace, "members", lambda init_pid: {})
    monkeypatch.setattr(namespace, "kill_all", lambda init_pid: happened.append("killed"))
    monkeypatch.setattr(criu, "_look", lambda *_: happened.append("looked"))
    return happened


@pytest.fixture
def restore(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Restores an image."""
    make_image(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)

    def run(program: Program, sound: Sound) -> int:
        return Criu(runner=program, cgroup_root=tmp_path).restore(
            os.getpid(), fd, [], root_pid_ns=ROOT, timeout_s=5, sound=sound, ready=lambda: program.log.append("ready")
        )

    yield run
    os.close(fd)


def answers(log: Log, error: Exception | None = None) -> Sound:
    """An image that is sound, or is not."""

    def sound(timeout_s: float | None = None) -> None:
        assert timeout_s is not None
        assert timeout_s <= 5
        log.append("sound?")
        if error is not None:
            raise error

    return sound


DAMAGED = ImageDamaged("alpha.7/0001: criu/pages-1.img: its contents have changed")
LATE = CheckpointError("alpha.7/0001: could not be verified in time")


def test_a_tree_is_let_go_when_its_image_is_verified(restore: Callable[..., int], log: Log) -> None:
    """And what it has open was looked at before, as that must not wait."""
    assert restore(Program(log), answers(log)) == ROOT
    assert log == ["criu", "looked", "sound?", "ready", "let go"]


@pytest.mark.parametrize("error", [DAMAGED, LATE, MemoryError("none left")])
def test_a_tree_whose_image_is_not_sound_is_never_let_go(
    restore: Callable[..., int], log: Log, error: Exception
) -> None:
    """What was found is told, not what CRIU says of a tree that was killed under its hands."""
    with pytest.raises(type(error), match=str(error)):
        restore(Program(log), answers(log, error))
    assert log[:4] == ["criu", "looked", "sound?", "killed"]
    assert not {"ready", "let go"} & set(log)


@pytest.mark.parametrize(
    ("found", "expected", "why"),
    [
        (DAMAGED, ImageDamaged, "its contents have changed"),
        (None, RestoreFailed, "CRIU could not restore it: File a has bad size"),
        (LATE, RestoreFailed, "CRIU could not restore it: File a has bad size"),
    ],
)
def test_where_criu_fails_a_damaged_image_is_the_reason(
    restore: Callable[..., int], log: Log, found: Exception | None, expected: type[Exception], why: str
) -> None:
    """Another copy may be sound: so that has to be known."""
    with pytest.raises(expected, match=why):
        restore(Program(log, fails=True), answers(log, found))
    assert log[:3] == ["criu", "killed", "sound?"]
    assert "ready" not in log


def test_without_criu_nothing_waits_for_the_digests(restore: Callable[..., int], log: Log) -> None:
    """It was killed while it held the tree, which would run now: that is ended first."""
    asked = threading.Event()

    class Killed(Program):
        """Ends, by a signal, before its script does."""

        def __call__(self, argv: Sequence[str], **options: Any) -> Completed:
            if "restore" not in argv:
                return super().__call__(argv, **options)
            work = Path(next(word for word in argv if word.startswith("--work-dir=")).partition("=")[2]).readlink()
            with (work / "ask").open("w") as ask:
                ask.write("\n")
            assert asked.wait(60)
            return Completed(tuple(argv), -9, b"", "")

    def sound(timeout_s: float | None = None) -> None:
        asked.set()
        deadline = time.monotonic() + 60
        while "killed" not in log:
            assert time.monotonic() < deadline
        raise DAMAGED

    with pytest.raises(ImageDamaged):
        restore(Killed(log), sound)
    assert log[:2] == ["looked", "killed"]


def test_where_criu_takes_too_long_nobody_waits_any_more(restore: Callable[..., int], log: Log) -> None:
    """The time is for both."""
    with pytest.raises(RestoreFailed, match="given up: nsenter: no answer within 5 s"):
        restore(Program(log, hangs=True), answers(log))
    assert set(log) == {"criu", "killed"}


def test_a_tree_ends_before_the_criu_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would run: CRIU has been started before it, and has a number above its."""
    there = [{900: 11, 8: 13, 7: 12}, {900: 11}, {}]
    sent: list[int] = []
    monkeypatch.setattr(namespace, "members", lambda init_pid, *, proc: there.pop(0))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    assert namespace.kill_all(10)
    assert sent == [12, 13, 11, 11]
