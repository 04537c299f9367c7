"""The compiled library of conservative backfill. ``test_simulation`` compares its schedules with the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.profile import native
from slurm_affinode.whatif.profile.native import Profile
from slurm_affinode.whatif.simulation import Workload, simulate


def test_structure_is_that_of_the_header() -> None:
    """Names and order of the fields."""
    header = re.sub(r"//.*", "", Path(native.__file__).with_name("profile.h").read_text())
    (body,) = re.findall(r"struct profile \{(.*?)\};", header, re.S)
    assert [name for name, _ in native.ProfileRecord._fields_] == re.findall(r"\b(\w+)(?=[,;])", body)


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Let the test load a library of its own."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("content", [None, b"", b"\x7fELF nonsense"], ids=["missing", "empty", "damaged"])
def test_missing_or_damaged_library_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    """Policies without reservations do not need it."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libprofile.so")
    if content is not None:
        native.LIBRARY.write_bytes(content)
    column = np.ones(1, np.int64)
    job = Workload(column, column, column, column, column, np.ones(1), column)
    assert simulate(job, 1, SchedulingPolicy("fcfs", "easy", "actual")).tolist() == [1]
    message = r"^\S*libprofile\.so: the compiled part of conservative backfill cannot be loaded: [^\n]*$"
    with pytest.raises(UnreachableError, match=message) as caught:
        simulate(job, 1, SchedulingPolicy("fcfs", "conservative", "actual"))
    assert caught.value.hint is not None
    assert "hatch_build.py" in caught.value.hint


@pytest.mark.usefixtures("unloaded")
def test_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_affinode.base.compiled.digest", lambda directory: "other")
    with pytest.raises(UnreachableError, match="was compiled from another version of its sources"):
        native.library()


def test_profile_has_room_for_all_jobs_at_once() -> None:
    """Each of 1,000 jobs waits or runs, and begins and ends at times of its own; one breakpoint is left at last."""
    count = 1000
    profile = Profile(np.ones(count, np.int64), count)
    spans = [3 * job + 2 for job in range(count)]
    for job, span in enumerate(spans):
        profile.add(job, job + span, -1) if job % 2 else profile.reserve(profile._record.waiting, job, span)
    assert count < profile._record.count <= 2 * count + 1
    for job, span in enumerate(spans):
        profile.add(*(job, job + span) if job % 2 else (0, span), 1)
    assert profile._record.count == 1
    assert profile._breakpoints[:2].tolist() == [[0, count], [2**63 - 1, 0]]


def test_job_waits_until_its_units_are_free_for_its_span() -> None:
    """A gap that is too short, or too narrow, is left to the next job."""
    profile = Profile(np.array([3, 2, 1], np.int64), 4)
    profile.add(0, 10, -3)
    profile.add(12, 20, -2)
    for job, span in enumerate((5, 3, 12)):
        profile.reserve(job, job, span)
    assert profile._start.tolist() == [20, 10, 0]
    profile.add(12, 20, 2)
    profile.move_forward()
    assert profile._start.tolist() == [13, 10, 0]
    assert profile.take_due(0) == ([2], 10)
    assert profile.take_due(10) == ([1], 13)
    assert profile.take_due(13) == ([0], 2**63 - 1)
