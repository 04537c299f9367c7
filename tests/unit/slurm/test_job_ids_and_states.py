"""Job IDs and states in every printed form."""

from __future__ import annotations

import pytest

from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.accounting import records
from slurm_affinode.slurm.identifiers import JobId


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("123", JobId(123)),
        ("123_4", JobId(123, array_task_id=4)),
        ("123_[1-9%2]", JobId(123, array_spec="1-9%2")),
        ("123+1", JobId(123, het_offset=1)),
        ("123.batch", JobId(123, step="batch")),
        ("123_4.extern", JobId(123, array_task_id=4, step="extern")),
        ("123.0", JobId(123, step="0")),
        ("123+1.0", JobId(123, het_offset=1, step="0")),
        ("123.0+1", JobId(123, step="0+1")),
        ("123.4294967291", JobId(123, step="batch")),
        ("123.interactive", JobId(123, step="interactive")),
    ],
)
def test_every_form_of_a_job_id(text: str, parts: JobId) -> None:
    """Arrays, heterogeneous components, steps, and steps with a number reserved by Slurm."""
    assert identifiers.parse(text) == parts


@pytest.mark.parametrize("text", ["", "abc", "12 3", "123_", "123.", "-5", "1_2_3", "123+x"])
def test_invalid_job_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a job ID"):
        identifiers.parse(text)


def test_substitute_ids_are_negative_and_distinct() -> None:
    """An array task without a raw ID gets an ID that no real job has."""
    result = {identifiers.stand_in(job, task) for job in (1, 2, 67_000_000) for task in (0, 1, 4_000_000)}
    assert len(result) == 9
    assert max(result) < 0
    assert min(result) > -(1 << 63)


@pytest.mark.parametrize(
    ("text", "state", "by"),
    [
        ("COMPLETED", "COMPLETED", None), ("CANCELLED by 1000", "CANCELLED", "1000"), ("CANCELLED+", "CANCELLED", None),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", None), ("OUT_OF_MEM", "OUT_OF_MEMORY", None), ("COMPLETI", "COMPLETING", None),
        ("COMPLET+", "COMPLETED", None), ("NODE_FAI+", "NODE_FAIL", None), ("CD", "COMPLETED", None),
        ("CA", "CANCELLED", None), ("F", "FAILED", None), ("TO", "TIMEOUT", None), ("OOM", "OUT_OF_MEMORY", None),
        ("R", "RUNNING", None), ("PD", "PENDING", None), ("CANCELLED b+", "CANCELLED", None), ("", None, None),
        ("running", "RUNNING", None), ("CA by ana", "CANCELLED", "ana"), ("LAUNCH_FAILED", "LAUNCH_FAILED", None),
    ],
)  # fmt: skip
def test_state_in_any_form_is_normalized(text: str, state: str | None, by: str | None) -> None:
    """Short and truncated names become the long one; an unknown name of a later release is kept."""
    assert records.parse(text) == (state, by)


@pytest.mark.parametrize("text", ["2025-01-01", "+", "RE+", "what is this"])
def test_invalid_state_is_refused(text: str) -> None:
    """So is a truncated word that may be several states."""
    with pytest.raises(ValueError, match="not a job state"):
        records.parse(text)


@pytest.mark.parametrize(
    ("spec", "tasks"),
    [
        (None, (1, None)), ("7", (1, None)), ("0-9", (10, None)), ("[0-9%2]", (10, 2)), ("0-9:2,14%3", (6, 3)),
        ("1,3,...", (2, None)), ("9-0", (1, None)), ("what", (1, None)), ("1-3%0", (3, None)),
    ],
)  # fmt: skip
def test_pending_tasks_of_an_array_are_counted(spec: str | None, tasks: tuple[int, int | None]) -> None:
    """The result is their number, and how many may run at once."""
    assert identifiers.tasks_in(spec) == tasks
