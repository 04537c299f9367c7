"""Behavior of the repository on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from sqlalchemy import event
from stored_steps import stored_steps

from slurm_affinode.base.config import UNNAMED_CLUSTER
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.db import accounting, migrations
from slurm_affinode.db.records import Counts, IngestProblem, IngestRecord, ReportRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting.schema import JOBS, RECORDED_GPUS, STEPS, empty

T0 = datetime(2026, 11, 1, tzinfo=UTC)
EARLY, LATE = T0 - timedelta(days=3650), T0 + timedelta(days=3650)
HOUR = timedelta(hours=1)

HOSTILE = "a|b\n\r\t'\"\\%s%(x)s;--<script>\N{PILE OF POO}e\N{COMBINING ACUTE ACCENT}\u200b\ud7ff\x1b[31m "


def running(**values):
    return {"state": "RUNNING", "start": T0, "elapsed_s": 60} | values


def ended(**values):
    return {"state": "COMPLETED", "start": T0, "end": T0 + HOUR, "elapsed_s": 3600} | values


def test_every_column_is_returned_unchanged(repository, jobs, steps, monkeypatch):
    """All types and their extremes are covered: texts, 64-bit integers, floats, booleans, times, nulls."""
    full = {}
    for name, dtype in JOBS.items():
        if isinstance(dtype, pl.Datetime):
            full[name] = T0 + HOUR
        elif isinstance(dtype, pl.String):
            full[name] = HOSTILE
        elif isinstance(dtype, pl.Boolean):
            full[name] = True
        elif isinstance(dtype, pl.Float64):
            full[name] = 1.1e300
        else:
            full[name] = 2**63 - 1
    zero = {name: 0 for name, dtype in JOBS.items() if isinstance(dtype, pl.Int64)}
    frame = jobs(full | {"start": T0}, ended(job_id=2, timelimit_unlimited=False), ended(**zero | {"job_id": 3}))
    repository.upsert(frame, empty(STEPS))
    assert_frame_equal(repository.jobs(EARLY, LATE).sort("job_id"), frame.sort("job_id"))
    # Many rows without floats are read as arrays from SQLite.
    columns = [name for name, dtype in JOBS.items() if not isinstance(dtype, pl.Float64)]
    monkeypatch.setattr(accounting, "SLICE", 2)
    monkeypatch.setattr(accounting, "ARRAY", 2)
    assert_frame_equal(repository.jobs(EARLY, LATE, columns=columns).sort("job_id"), frame[columns].sort("job_id"))


def test_upsert_of_the_same_input_is_a_no_op(repository, jobs, steps, gpus):
    frame, parts, held = jobs(ended(), running(job_id=2)), steps({}, {"step_id": "0"}), gpus({}, {"start": None})
    first = repository.upsert(frame, parts)
    assert (first.jobs, first.steps) == (Counts(new=2), Counts(new=2))
    assert repository.upsert_allocation_gpus(held) == Counts(new=2)
    before = repository.fingerprint(EARLY, LATE)
    second = repository.upsert(frame, parts)
    assert (second.jobs, second.steps) == (Counts(unchanged=2), Counts(unchanged=2))
    assert repository.upsert_allocation_gpus(held) == Counts(unchanged=2)
    assert repository.fingerprint(EARLY, LATE) == before


def test_running_job_is_completed_by_a_later_record(repository, jobs, all_jobs):
    repository.upsert(jobs(running(work_dir="/home/a")))
    assert repository.upsert(jobs(ended())).jobs == Counts(updated=1)
    [job] = all_jobs()
    assert (job["state"], job["end"], job["elapsed_s"], job["work_dir"]) == ("COMPLETED", T0 + HOUR, 3600, "/home/a")


def test_older_record_does_not_revert_a_completed_attempt(repository, jobs, all_jobs):
    """Files may be out of order: running and pending records come after the end and fill only unknown fields."""
    repository.upsert(jobs(ended(reason=None)))
    late = jobs(running(account="physics", reason="Priority"))
    assert repository.upsert(late).jobs == Counts(updated=1)
    assert repository.upsert(jobs({"state": "PENDING", "array_spec": "1-9"})).jobs == Counts(unchanged=1)
    [job] = all_jobs()
    assert (job["state"], job["end"], job["account"]) == ("COMPLETED", T0 + HOUR, "physics")
    assert (job["reason"], job["array_spec"]) == (None, None)


def test_record_with_fewer_fields_erases_nothing(repository, jobs, all_jobs):
    repository.upsert(jobs(ended(account="physics", gpus=0)))
    repository.upsert(jobs(ended(account=None, gpus=None, qos="normal")))
    [job] = all_jobs()
    assert (job["account"], job["gpus"], job["qos"]) == ("physics", 0, "normal")


def test_started_job_keeps_its_key_and_drops_its_pending_fields(repository, jobs, all_jobs):
    repository.upsert(jobs({"state": "PENDING", "reason": "Priority", "array_spec": "1-9%2"}))
    assert all_jobs() == []
    repository.upsert(jobs(running()))
    [job] = all_jobs()
    assert (job["state"], job["reason"], job["array_spec"]) == ("RUNNING", None, None)


def test_running_record_with_longer_elapsed_time_is_newer(repository, jobs, all_jobs):
    repository.upsert(jobs(running(elapsed_s=600)))
    repository.upsert(jobs(running(elapsed_s=60)))
    assert all_jobs()[0]["elapsed_s"] == 600


def test_priority_of_a_job_stored_by_an_earlier_release_is_unknown(repository, jobs, all_jobs):
    """A later record without the field does not erase a known one."""
    repository.upsert(jobs(running()))
    assert all_jobs()[0]["priority"] is None
    repository.upsert(jobs(ended(priority=4294901759)))
    repository.upsert(jobs(ended()))
    assert all_jobs()[0]["priority"] == 4294901759


def test_suspended_time_makes_a_running_record_newer(repository, jobs, all_jobs):
    """The elapsed time of a suspended job does not increase."""
    repository.upsert(jobs(running(elapsed_s=600, suspended_s=3000, state="SUSPENDED")))
    repository.upsert(jobs(running(elapsed_s=600, suspended_s=60)))
    assert [(job["state"], job["suspended_s"]) for job in all_jobs()] == [("SUSPENDED", 3000)]
    assert repository.newest_times() == {"c1": T0 + HOUR}


def test_repeated_records_of_one_file_are_one_attempt(repository, jobs, all_jobs):
    frame = jobs(ended(), running(qos="high"), ended(), {"state": "PENDING", "reason": "Resources"})
    assert repository.upsert(frame).jobs == Counts(new=1, unchanged=3)
    [job] = all_jobs()
    assert (job["state"], job["qos"], job["reason"]) == ("COMPLETED", "high", None)


def test_requeued_attempts_are_kept_apart(repository, jobs, all_jobs):
    again = T0 + 2 * HOUR
    repository.upsert(jobs(ended(state="REQUEUED"), ended(submit=again, start=again, end=again + HOUR)))
    assert [job["submit"] for job in all_jobs()] == [T0, again]


def test_attempts_are_found_by_half_open_overlap(repository, jobs):
    """An attempt that ends when the interval begins, or starts when it ends, is outside; one of no length is inside."""
    repository.upsert(
        jobs(
            ended(job_id=1, start=T0 - HOUR, end=T0),
            ended(job_id=2, start=T0 - HOUR, end=T0 + timedelta(seconds=1)),
            ended(job_id=3, start=T0, end=T0),
            running(job_id=4, start=T0 - 99 * HOUR),
            ended(job_id=5, start=T0 + HOUR, end=T0 + 2 * HOUR),
            {"job_id": 6, "state": "CANCELLED", "end": T0 + HOUR / 2},
        )
    )
    result = repository.jobs(T0, T0 + HOUR).get_column("job_id").sort().to_list()
    assert result == [2, 3, 4]
    assert repository.jobs(T0, T0 + HOUR + timedelta(milliseconds=1)).height == 4


def test_filters_and_columns_are_applied(repository, jobs, steps, gpus):
    repository.upsert(
        jobs(
            ended(job_id=1, user="ann", account="a", partition="gpu", gpus=2),
            ended(job_id=2, user="Ann", account="a", partition="cpu", gpus=0),
            ended(job_id=3, user="bob", account=None, partition="gpu", cluster="c2"),
        ),
        steps({"job_id": 1}, {"job_id": 2}, {"job_id": 3, "cluster": "c2"}),
    )
    repository.upsert_allocation_gpus(gpus({"job_id": 1, "start": None, "node": None}, {"job_id": 2}))

    def ids(**filters):
        return repository.jobs(EARLY, LATE, **filters).get_column("job_id").sort().to_list()

    assert ids(users=["ann"]) == [1]
    assert ids(accounts=["a"]) == [1, 2]
    assert ids(partitions=["gpu"], clusters=["c2"]) == [3]
    assert ids(users=["' OR 1=1 --"]) == []
    assert ids(gpu_only=True) == [1, 3]
    repository.upsert(jobs(running(job_id=4, user="ann")))
    assert ids(users=["ann"]) == [1, 4]
    assert ids(users=["ann"], ended_only=True) == [1]
    assert repository.jobs(EARLY, LATE, columns=["gpus", "user"]).columns == ["gpus", "user"]
    held = repository.allocation_gpus(EARLY, LATE, users=["ann"])
    assert held.schema == empty(RECORDED_GPUS).schema
    assert held.to_dicts() == [
        {"cluster": "c1", "job_id": 1, "start": None, "node": None, "gpu": "GPU-a", "attempts": 1}
    ]


def test_attempts_of_a_job_are_counted_over_all_times(repository, jobs, gpus):
    """Slurm used the ID again years later; pending attempts do not count."""
    years = 9_000 * HOUR
    pending = {"state": "PENDING", "start": None, "end": None, "elapsed_s": 0, "submit": T0 + 3 * years}
    again = ended(submit=T0 + years, start=T0 + years, end=T0 + years + HOUR)
    repository.upsert(jobs(ended(), again, pending))
    repository.upsert_allocation_gpus(gpus({"start": None}))
    assert repository.allocation_gpus(T0 + years, LATE + 2 * years)["attempts"].to_list() == [2]


def test_undated_records_are_deleted_with_the_runs_of_their_job(repository, jobs, gpus):
    """Otherwise they would belong to the later job with the same ID."""
    repository.upsert(jobs(ended(), ended(submit=T0 + 9 * HOUR, start=T0 + 9 * HOUR, end=T0 + 10 * HOUR)))
    repository.upsert_allocation_gpus(gpus({"start": None}, {"start": T0 + 9 * HOUR}))
    repository.delete_before(T0 + 2 * HOUR)
    assert repository.allocation_gpus(EARLY, LATE)["start"].to_list() == [T0 + 9 * HOUR]
    assert repository.counts().allocation_gpus == 1


def test_similar_keys_stay_apart(repository, jobs, all_jobs):
    """Case, accents and trailing blanks distinguish clusters on every database."""
    names = ["c", "C", "c ", "ç", "\N{PILE OF POO}", "\N{PERSEVERING FACE}"]
    assert repository.upsert(jobs(*(ended(cluster=name) for name in names))).jobs == Counts(new=6)
    assert {job["cluster"] for job in all_jobs()} == set(names)
    assert repository.upsert(jobs(*(ended(cluster=name) for name in names))).jobs == Counts(unchanged=6)


def test_nul_is_replaced(repository, jobs, all_jobs):
    repository.upsert(jobs(ended(job_name="a\0b")))
    assert all_jobs()[0]["job_name"] == "a\N{REPLACEMENT CHARACTER}b"
    assert repository.upsert(jobs(ended(job_name="a\0b"))).jobs == Counts(unchanged=1)


def test_text_of_a_megabyte_is_stored(repository, jobs, all_jobs):
    repository.upsert(jobs(ended(submit_line="x" * 1_000_000)))
    assert len(all_jobs()[0]["submit_line"]) == 1_000_000


def test_record_without_a_complete_key_is_refused(repository, jobs, all_jobs):
    with pytest.raises(InputError, match="a record has no submit: cluster c1, job_id 7"):
        repository.upsert(jobs(ended(), ended(job_id=7, submit=None)))
    with pytest.raises(InputError, match="cluster is longer than 128 characters"):
        repository.upsert(jobs(ended(), ended(cluster="c" * 129)))
    assert all_jobs() == []


def test_failed_call_changes_nothing(repository, jobs, steps, all_jobs):
    with pytest.raises(InputError):
        repository.upsert(jobs(ended()), steps({"step_id": None}))
    assert all_jobs() == []


def test_sparse_and_dense_job_ids_are_found_again(repository, jobs):
    ids = [*range(1, 50), 10**6, 10**9, 2**40]
    frame = jobs(*(ended(job_id=number) for number in ids))
    repository.upsert(frame)
    assert repository.upsert(frame).jobs == Counts(unchanged=len(ids))
    assert repository.upsert(jobs(*(ended(job_id=n, qos="q") for n in ids[-3:]))).jobs == Counts(updated=3)


def test_ingest_journal_has_the_ingested_sources(repository):
    record = IngestRecord(
        kind="sacct", source="jobs\udcff.txt", started=T0, finished=T0 + HOUR, records=10, new=7, updated=1,
        unchanged=2, bad=300, problems=tuple(IngestProblem(f"bad {n}", n) for n in range(300)),
        notes=("a note <>",), fingerprint="f", first=T0, last=T0 + HOUR,
    )  # fmt: skip
    assert repository.record_ingest(record) == 1
    assert repository.record_ingest(IngestRecord("gpu", "x", T0, T0)) == 2
    assert repository.fingerprints("sacct") == {"f"}
    assert repository.fingerprints("gpu") == frozenset()
    [kept] = repository.ingests(kind="sacct")
    assert (kept.id, kept.source, kept.bad, len(kept.problems)) == (1, "jobs\\udcff.txt", 300, 200)
    assert kept.problems[7] == IngestProblem("bad 7", 7)
    assert (kept.notes, kept.first, kept.finished) == (("a note <>",), T0, T0 + HOUR)
    assert [entry.kind for entry in repository.ingests(since=T0)] == ["sacct", "gpu"]
    assert [entry.kind for entry in repository.ingests(since=T0 + HOUR)] == ["sacct"]


def test_reports_and_values_are_replaced(repository):
    record = ReportRecord("day", "2026-11-01", T0, T0 + 24 * HOUR, "day/2026-11-01", T0, "f1", {"idle": 0.5})
    later = ReportRecord("day", "2026-11-01", T0, T0 + 24 * HOUR, "day/2026-11-01", T0, "f2")
    repository.record_report(record)
    assert repository.reports() == [record]
    repository.record_report(later)
    assert repository.reports() == [later]
    repository.delete_reports([later])
    repository.delete_reports([])
    assert repository.reports() == []
    assert repository.get("x") is None
    repository.set("x", "1")
    repository.set("x", "2")
    assert repository.get("x") == "2"


def test_retention_deletes_ended_jobs_and_keeps_running_ones(repository, jobs, steps, gpus):
    repository.upsert(
        jobs(
            ended(job_id=1, end=T0),
            ended(job_id=2, end=T0 + HOUR),
            running(job_id=3, start=T0 - 999 * HOUR),
            {"job_id": 4, "state": "PENDING", "submit": T0 - HOUR},
        ),
        steps({"job_id": 1}, {"job_id": 2}),
    )
    repository.upsert_allocation_gpus(gpus({"job_id": 1}, {"job_id": 2}, {"job_id": 9, "start": T0 + HOUR}))
    repository.record_ingest(
        IngestRecord("sacct", "old", T0, T0, bad=1, problems=(IngestProblem("x"),)),
    )
    assert repository.delete_before(T0 + timedelta(seconds=1)) == 2
    counts = repository.counts()
    assert (counts.jobs, counts.steps, counts.allocation_gpus, counts.ingests) == (2, 1, 2, 0)
    assert repository.record_ingest(IngestRecord("sacct", "new", T0, T0)) == 2


def test_retention_deletes_steps_with_their_run_and_old_steps_without_one(repository, jobs, steps):
    """A step that is not old may have been recorded before its run."""
    old = T0 - HOUR
    repository.upsert(
        jobs(ended(job_id=1, end=old), running(job_id=2, start=T0 - 999 * HOUR)),
        steps(
            {"job_id": 1, "end": old},
            {"job_id": 1, "step_id": "0"},
            {"job_id": 2, "end": old},
            {"job_id": 3, "end": old},
            {"job_id": 4, "submit": old},
            {"job_id": 5, "end": T0 + HOUR},
        ),
    )
    repository.delete_before(T0)
    assert sorted(stored_steps(repository)["job_id"]) == [2, 5]


@pytest.mark.parametrize("cluster", ["c1", UNNAMED_CLUSTER])
def test_retention_keeps_undated_gpus_until_their_run_is_deleted(repository, jobs, gpus, cluster):
    """Their age is unknown: they may be of a job that accounting does not know yet."""
    repository.upsert_allocation_gpus(gpus({"start": None, "cluster": cluster}))
    repository.delete_before(T0)
    assert repository.counts().allocation_gpus == 1
    repository.upsert(jobs(ended()))
    repository.delete_before(T0 + 2 * HOUR)
    assert repository.counts().allocation_gpus == 0


def test_interval_has_runs_that_began_long_before_it(repository, jobs):
    """Also if start and end of the longest run came in different records, and others came later."""
    repository.upsert(jobs(running(job_id=1), running(job_id=2)))
    repository.upsert(jobs({"job_id": 2, "state": "COMPLETED", "end": T0 + 100 * HOUR}))
    repository.upsert(jobs(ended(job_id=3), ended(job_id=4, start=T0 + 40 * HOUR, end=T0 + 60 * HOUR)))
    assert sorted(repository.jobs(T0 + 50 * HOUR, T0 + 51 * HOUR)["job_id"]) == [1, 2, 4]


def test_last_time_is_the_latest_start_or_end(repository, jobs):
    repository.upsert(jobs({"job_id": 4, "state": "PENDING"}))
    assert repository.last_time() is None
    repository.upsert(jobs(ended(end=T0 + HOUR)))
    assert repository.last_time() == T0 + HOUR
    repository.upsert(jobs(running(job_id=2, start=T0 + 2 * HOUR)))
    assert repository.last_time() == T0 + 2 * HOUR


def test_journal_entries_of_many_files_are_one_transaction(repository):
    commits = []
    event.listen(repository.engine, "commit", commits.append)
    repository.record_ingest(IngestRecord("sacct", "x", T0, T0))
    needed = len(commits)  # on MariaDB, the lock takes further ones
    problem = IngestProblem("x")
    records = [IngestRecord("gpu", f"f{at}", T0, T0, bad=at % 2, problems=(problem,) * (at % 2)) for at in range(50)]
    assert repository.record_ingests(records) == 51
    assert len(commits) == 2 * needed
    assert repository.record_ingests([]) == 51
    assert [entry.source for entry in repository.ingests(kind="gpu")] == [record.source for record in records]
    assert [entry.problems for entry in repository.ingests(only_bad=True)] == [(problem,)] * 25


def test_counts_of_the_database(repository, jobs):
    assert repository.counts().first is None
    repository.upsert(jobs(ended(gpus=2), running(job_id=2, start=T0 - HOUR), ended(job_id=3, cluster="b")))
    counts = repository.counts()
    assert (counts.jobs, counts.gpu_jobs, counts.running_jobs, counts.clusters) == (3, 1, 1, ("b", "c1"))
    assert (counts.first, counts.last) == (T0 - HOUR, T0 + HOUR)


def test_fingerprint_depends_on_the_attempts_of_the_interval(repository, jobs, gpus):
    repository.upsert(jobs(ended(), ended(job_id=2, start=T0 + 9 * HOUR, end=T0 + 10 * HOUR)))
    before = repository.fingerprint(T0, T0 + HOUR)
    repository.upsert(jobs(ended(job_id=2, start=T0 + 9 * HOUR, end=T0 + 10 * HOUR, qos="x")))
    assert repository.fingerprint(T0, T0 + HOUR) == before
    repository.upsert(jobs(ended(qos="x")))
    changed = repository.fingerprint(T0, T0 + HOUR)
    assert changed != before
    repository.upsert_allocation_gpus(gpus({}))
    assert repository.fingerprint(T0, T0 + HOUR) != changed


def test_empty_database_returns_empty_frames(repository):
    assert repository.jobs(EARLY, LATE).schema == empty(JOBS).schema
    assert stored_steps(repository).schema == empty(STEPS).schema
    assert repository.allocation_gpus(EARLY, LATE).schema == empty(RECORDED_GPUS).schema
    assert repository.upsert(empty(JOBS), empty(STEPS)).jobs == Counts()


def test_reopened_database_has_the_written_rows(store_url, jobs):
    with Repository.open(store_url) as first:
        first.upsert(jobs(ended()))
        assert "affinode" in first.where
    with Repository.open(store_url) as second:
        assert second.jobs(EARLY, LATE).height == 1
        assert migrations.status(second.engine).pending == ()


def test_unexpected_database_error_is_one_line(repository):
    with pytest.raises(AffinodeError, match="database error") as caught:
        repository.record_ingest(IngestRecord("sacct", "x", T0, T0, records=None))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


WAITED = T0 - timedelta(minutes=5)


@pytest.mark.parametrize("first", ["guess", "true"])
def test_attempt_without_submit_time_is_not_counted_twice(repository, jobs, steps, all_jobs, first):
    """One of two field sets lacks Submit, which Start replaces: one attempt results, with the true submit time."""
    guess = jobs(ended(submit=T0, qos="normal")), steps({"submit": T0, "step_name": "batch"})
    true = jobs(ended(submit=WAITED, account="physics")), steps({"submit": WAITED, "step_id": "0"})
    for frames in (guess, true) if first == "guess" else (true, guess):
        repository.upsert(*frames)
    [job] = all_jobs()
    assert (job["submit"], job["qos"], job["account"]) == (WAITED, "normal", "physics")
    result = stored_steps(repository).sort("step_id")
    assert result.get_column("step_id").to_list() == ["0", "batch"]
    assert result.get_column("submit").unique().to_list() == [WAITED]
    for frames in (guess, true):
        again = repository.upsert(*frames)
        assert (again.jobs, again.steps) == (Counts(unchanged=1), Counts(unchanged=1))


def test_both_kinds_of_record_in_one_input_are_one_attempt(repository, jobs, steps, all_jobs):
    repository.upsert(jobs(ended(submit=T0)))
    frame = jobs(ended(submit=T0, qos="q"), ended(submit=WAITED), ended(submit=datetime(1970, 1, 1, tzinfo=UTC)))
    repository.upsert(frame, steps({"submit": T0}, {"submit": WAITED, "step_id": "0"}))
    [job] = all_jobs()
    assert (job["submit"], job["qos"]) == (WAITED, "q")
    assert repository.counts().steps == 2


def test_later_attempt_with_the_first_submit_time_replaces_none(repository, jobs, all_jobs):
    """Two attempts were distinguished when they came together; the second comes again, alone, after its end."""
    again = T0 + 2 * HOUR
    repository.upsert(jobs(ended(state="REQUEUED"), running(submit=T0 + HOUR, start=again)))
    last = jobs(ended(start=again, end=again + HOUR))
    assert repository.upsert(last).jobs == Counts(updated=1)
    assert [(job["submit"], job["start"], job["state"]) for job in all_jobs()] == [
        (T0, T0, "REQUEUED"), (T0 + HOUR, again, "COMPLETED"),
    ]  # fmt: skip
    assert repository.upsert(last).jobs == Counts(unchanged=1)


def test_requeued_attempt_stays_apart_from_one_without_submit_time(repository, jobs, all_jobs):
    again = T0 + 2 * HOUR
    repository.upsert(jobs(ended(submit=T0), ended(submit=again, start=again, end=again + HOUR)))
    repository.upsert(jobs(ended(submit=WAITED), ended(submit=T0 + HOUR, start=again, end=again + HOUR)))
    assert [job["submit"] for job in all_jobs()] == [WAITED, T0 + HOUR]


def test_attempt_ingested_alone_passes_its_key_to_the_previous_one(repository, jobs, all_jobs):
    """The second attempt came first, under the common submit time; then both came, distinguished."""
    again = T0 + 2 * HOUR
    repository.upsert(jobs(ended(start=again, end=again + HOUR)))
    both = jobs(ended(state="REQUEUED"), running(submit=T0 + HOUR, start=again))
    for counts in (Counts(new=1, updated=0, unchanged=1), Counts(unchanged=2)):
        assert repository.upsert(both).jobs == counts
        assert sorted((job["submit"], job["start"], job["state"]) for job in all_jobs()) == [
            (T0, T0, "REQUEUED"), (T0 + HOUR, again, "COMPLETED"),
        ]  # fmt: skip


def test_newest_times_of_each_cluster(repository, jobs):
    """They are ends; for a job that has not ended, how far it had run, or when it was submitted."""
    assert repository.newest_times() == {}
    repository.upsert(
        jobs(
            ended(cluster="alpha"),
            running(cluster="alpha", job_id=2, start=T0 + HOUR, elapsed_s=7200),
            ended(cluster="beta", job_id=3),
            {"cluster": "gamma", "job_id": 4, "submit": T0 + 5 * HOUR, "state": "PENDING", "start": None, "end": None},
        )
    )
    assert repository.newest_times() == {"alpha": T0 + 3 * HOUR, "beta": T0 + HOUR, "gamma": T0 + 5 * HOUR}


def test_recorded_gpus_of_another_cluster_name_belong_to_the_only_cluster(repository, jobs, gpus):
    repository.upsert(jobs(ended(cluster="alpha")))
    repository.upsert_allocation_gpus(gpus({"cluster": "default"}))
    assert repository.allocation_gpus(EARLY, LATE)["cluster"].to_list() == ["alpha"]
    repository.upsert(jobs(ended(cluster="beta", job_id=9)))
    assert repository.allocation_gpus(EARLY, LATE).is_empty()
