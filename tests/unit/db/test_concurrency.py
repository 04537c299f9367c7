"""Concurrent writes by several processes: nothing is lost, duplicated, incomplete, or refused because of locks."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

from stored_steps import stored_steps

from slurm_affinode.db.records import Counts
from slurm_affinode.db.repository import Repository

T0 = datetime(2026, 11, 1, tzinfo=UTC)
EARLY, LATE = T0 - timedelta(days=3650), T0 + timedelta(days=3650)

WRITER = """
import sys
from datetime import UTC, datetime, timedelta
import polars as pl
from slurm_affinode.slurm.accounting.schema import JOBS, STEPS, conform
from slurm_affinode.db.records import IngestRecord
from slurm_affinode.db.repository import Repository

url, first, last, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
t0 = datetime(2026, 11, 1, tzinfo=UTC)
ids = pl.DataFrame({"job_id": range(first, last)})
ids = ids.with_columns(cluster=pl.lit("c"), submit=pl.lit(t0), start=pl.lit(t0))
running = conform(ids.with_columns(state=pl.lit("RUNNING")), JOBS)
ended = conform(ids.with_columns(state=pl.lit("COMPLETED"), end=pl.lit(t0 + timedelta(hours=1))), JOBS)
steps = conform(ids.with_columns(step_id=pl.lit("batch")), STEPS)
sys.stdin.readline()
new = 0
with Repository.open(url) as repository:
    print("open", flush=True)
    for number in range(rounds):
        frame = running if number % 2 == 0 else ended
        outcome = repository.upsert(frame, steps)
        repository.record_ingest(IngestRecord("sacct", f"{first}", t0, t0))
        new += outcome.jobs.new
print(new)
"""


def start(url, first, last, rounds):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITER, url, str(first), str(last), str(rounds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_overlapping_ingests_of_processes_add_up(store_url):
    """Four processes create the database and ingest overlapping parts: every attempt is new exactly once."""
    writers = [start(store_url, first, first + 400, 4) for first in (0, 200, 400, 0)]
    for writer in writers:  # all have started and imported their modules before the first continues
        writer.stdin.write("go\n")
        writer.stdin.flush()
    outcomes = [writer.communicate(timeout=240) for writer in writers]
    assert [error for _, error in outcomes] == [""] * 4
    assert [writer.returncode for writer in writers] == [0] * 4
    assert sum(int(out.split()[-1]) for out, _ in outcomes) == 800
    with Repository.open(store_url) as repository:
        jobs = repository.jobs(EARLY, LATE)
        assert jobs.height == jobs.n_unique(["cluster", "job_id", "submit"]) == 800
        assert jobs.get_column("state").unique().to_list() == ["COMPLETED"]
        counts = repository.counts()
        assert (counts.steps, counts.ingests) == (800, 16)


def test_killed_writer_leaves_nothing_incomplete(store_url):
    """Committed data is complete, and the next writer can begin immediately; it is killed by another signal."""
    with Repository.open(store_url) as repository:
        for number in (signal.SIGKILL, signal.SIGTERM):
            victim = start(store_url, 0, 3000, 1000)
            victim.stdin.write("go\n")
            victim.stdin.flush()
            assert victim.stdout.readline() == "open\n"
            victim.send_signal(number)
            victim.communicate(timeout=240)
            jobs, steps = repository.jobs(EARLY, LATE), stored_steps(repository)
            assert jobs.height in (0, 3000)
            assert steps.height == jobs.height
        writer = start(store_url, 0, 3000, 2)
        _, error = writer.communicate("go\n", timeout=240)
        assert (writer.returncode, error) == (0, "")
        assert repository.jobs(EARLY, LATE).height == 3000
        assert repository.upsert(jobs).jobs == Counts(unchanged=jobs.height)


def test_reader_sees_a_consistent_state_during_a_write(store_url):
    with Repository.open(store_url) as repository:
        writer = start(store_url, 0, 1000, 2)
        writer.stdin.write("go\n")
        writer.stdin.flush()
        seen = set()
        while writer.poll() is None:
            seen.add(repository.jobs(EARLY, LATE, columns=["job_id"]).height)
        _, error = writer.communicate(timeout=240)
        assert error == ""
        assert seen <= {0, 1000}
