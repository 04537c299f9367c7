"""Results that are kept while a command runs, and used by the next one for the same data."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slurm_affinode.analysis.join.kernel import Folded
from slurm_affinode.analysis.result import SUMS
from slurm_affinode.pipeline import partial_results
from slurm_affinode.pipeline.partial_results import PartialResults, TasksKey

SINCE, UNTIL = "2026-11-02T00:00:01Z", "2026-11-02T00:01:01.25Z"
KEY = TasksKey("1.0, abc", "d" * 32, "fold_range", SINCE, UNTIL, 5)
CONTINUES = f"the same command with --since {SINCE} --until {UNTIL} continues"


def folded(number: int) -> Folded:
    """Return made-up sums; the first ones are empty."""
    cells, partly, idle = number, number // 2, 3 * number
    return Folded(
        cell=np.arange(cells), sums=np.full((cells, len(SUMS)), number / 3), peak=np.full(cells, number, np.int32),
        partly_cell=np.arange(partly), partly_sums=np.full((partly, len(SUMS)), -0.5), partly_time=np.arange(partly),
        idle=np.arange(4 * idle).reshape(-1, 4), gap_ms=number, gaps=1, samples=10 * number,
    )  # fmt: skip


class Run:
    """A command that notes which tasks it computes, and ends after some of them."""

    def __init__(self, directory: Path, key: TasksKey = KEY, *, end: int | None = None) -> None:
        self.computed: list[int] = []
        self.lines: list[str] = []
        self.results: list[Folded] = []
        self._end = end
        try:
            with PartialResults(directory, self.lines.append) as kept:
                self.results += kept.resumed(key, self._compute)
        except KeyboardInterrupt:
            assert end is not None

    def _compute(self, first: int) -> Generator[Folded, None, None]:
        for number in range(first, KEY.tasks):
            if number == self._end:
                raise KeyboardInterrupt
            self.computed.append(number)
            yield folded(number)


def assert_complete(run: Run) -> None:
    """All ranges have their sums, in order."""
    assert len(run.results) == KEY.tasks
    for number, result in enumerate(run.results):
        for name in Folded.__slots__:
            assert np.array_equal(getattr(result, name), getattr(folded(number), name)), name
            assert np.asarray(getattr(result, name)).dtype == np.asarray(getattr(folded(number), name)).dtype


def kept(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def test_interrupted_fold_continues_and_then_nothing_is_left(tmp_path: Path) -> None:
    """Twice: the second run continues after the first one, the third after both."""
    directory = tmp_path / "kept"
    first, second = Run(directory, end=2), Run(directory, end=4)
    assert (first.computed, second.computed) == ([0, 1], [2, 3])
    assert first.lines == [f"the results of 2 of 5 tasks are kept: {CONTINUES}"]
    last = Run(directory)
    assert (last.computed, last.lines) == ([4], [])
    assert_complete(last)
    assert kept(directory) == []


def test_fold_that_ends_before_the_first_range_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, end=0)
    assert (run.lines, kept(tmp_path)) == ([], [])


def test_complete_tasks_are_kept_until_the_command_is_complete(tmp_path: Path) -> None:
    """A command that fails after them, or in its next tasks, computes none of them again."""
    other = replace(KEY, digest="f" * 32, function="replay")

    def attempt(*, fails: bool) -> tuple[list[int], list[str]]:
        computed: list[int] = []
        lines: list[str] = []

        def compute(first: int) -> Generator[Folded, None, None]:
            for number in range(first, KEY.tasks):
                computed.append(number)
                yield folded(number)

        ends = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
        with ends, PartialResults(tmp_path, lines.append) as results:
            assert len(list(results.resumed(KEY, compute))) == KEY.tasks
            following = results.resumed(other, compute)
            next(following)
            assert 1 / (not fails)
            assert len(list(following)) == KEY.tasks - 1
        return computed, lines

    assert attempt(fails=True) == ([0, 1, 2, 3, 4, 0], [f"the results of 6 of 10 tasks are kept: {CONTINUES}"])
    assert len(kept(tmp_path)) == 2
    assert attempt(fails=False) == ([1, 2, 3, 4], [])
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"version": "1.1, abc"}, "are of another version"),
        ({"digest": "e" * 32}, "are of other samples, jobs or options"),
    ],
)
def test_results_of_other_inputs_are_deleted_with_a_line(tmp_path: Path, change: dict[str, str], line: str) -> None:
    Run(tmp_path, replace(KEY, digest="f" * 32, **change) if "version" in change else replace(KEY, **change), end=3)
    run = Run(tmp_path)
    assert run.computed == [0, 1, 2, 3, 4]
    assert len(run.lines) == 1
    assert line in run.lines[0]
    assert_complete(run)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("change", [{"since": "2026-11-01T00:00:00Z"}, {"function": "replay"}])
def test_results_for_another_interval_or_of_another_function_stay_for_a_week(
    tmp_path: Path, change: dict[str, str]
) -> None:
    Run(tmp_path, replace(KEY, digest="f" * 32, **change), end=3)
    (other,) = kept(tmp_path)
    assert Run(tmp_path).lines == []
    assert kept(tmp_path) == [other]
    before = other.stat().st_mtime - partial_results.KEPT_S - 60
    os.utime(other, (before, before))
    assert Run(tmp_path).lines == []
    assert kept(tmp_path) == []


def test_file_of_another_format_is_deleted_with_a_line(tmp_path: Path) -> None:
    """As 0.9.0 wrote it."""
    path = tmp_path / f"{'f' * 32}.sums"
    path.write_bytes(b'{"format": 1, "version": "0.9.0", "digest": "f", "since_ms": 1, "until_ms": 2, "ranges": 5}\n')
    run = Run(tmp_path)
    assert_complete(run)
    assert run.lines == [
        f"{path}: partial results are of another version of slurm-affinode: ignored, and deleted"
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"\0", b"[" * 5000, b"{}\n", b'{"format": 2, "tasks": "x"}\n'])
def test_file_that_is_no_list_of_results_is_deleted_with_a_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.sums"
    path.write_bytes(content)
    run = Run(tmp_path)
    assert_complete(run)
    assert run.lines == [f"{path}: partial results are damaged: ignored, and deleted"]


def test_results_are_closed_to_other_users(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    Run(directory, end=2)
    assert [path.stat().st_mode & 0o777 for path in (directory, *kept(directory))] == [0o700, 0o600]


def test_every_change_of_a_byte_is_noticed(tmp_path: Path) -> None:
    """The ranges before the damage are used, and no others."""
    Run(tmp_path, end=4)
    (path,) = kept(tmp_path)
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        run = Run(tmp_path)
        assert run.computed[0] < 4
        assert len(run.lines) == 1
        assert "damaged" in run.lines[0]
        assert_complete(run)


def test_truncated_file_is_used_up_to_the_last_whole_record(tmp_path: Path) -> None:
    """As after a crash while it was written, wherever that was."""
    Run(tmp_path, end=3)
    (path,) = kept(tmp_path)
    content = path.read_bytes()
    for length in range(0, len(content), 5):
        path.write_bytes(content[:length])
        run = Run(tmp_path)
        assert run.computed[-1] == 4
        assert_complete(run)


def test_records_of_other_places_are_not_used(tmp_path: Path) -> None:
    """A record that is repeated is damage."""
    Run(tmp_path, end=1)
    (path,) = kept(tmp_path)
    header, record = path.read_bytes().split(b"\n", 1)
    path.write_bytes(header + b"\n" + record + record)
    run = Run(tmp_path)
    assert run.computed == [1, 2, 3, 4]
    assert_complete(run)


def test_file_in_use_is_left_to_its_process(tmp_path: Path) -> None:
    Run(tmp_path, end=2)
    (path,) = kept(tmp_path)
    content = path.read_bytes()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run = Run(tmp_path)
    assert run.computed == [0, 1, 2, 3, 4]
    assert path.read_bytes() == content


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("x")
    directory = tmp_path / "kept"
    directory.mkdir()
    (directory / f"{KEY.digest}.sums").symlink_to(target)
    run = Run(directory)
    assert_complete(run)
    assert target.read_text() == "x"
    assert len(run.lines) == 1
    assert "partial results are not kept" in run.lines[0]


@pytest.mark.parametrize("kind", ["fifo", "second name"])
def test_other_kinds_of_files_are_not_written(tmp_path: Path, kind: str) -> None:
    """The owner of the directory may be another user than that of the command."""
    directory, target = tmp_path / "kept", tmp_path / "target"
    directory.mkdir()
    target.write_text("x")
    path = directory / f"{KEY.digest}.sums"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.hardlink_to(target)
    run = Run(directory)
    assert_complete(run)
    assert target.read_text() == "x"
    assert len(run.lines) == 1
    assert "partial results are not kept" in run.lines[0]


def test_full_disk_ends_the_keeping_and_not_the_fold(tmp_path: Path) -> None:
    """A limit of the size of files has the same effect in the middle of a record."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        run = Run(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_complete(run)
    assert len(run.lines) == 1
    assert "File too large" in run.lines[0]
    assert kept(tmp_path) == []
