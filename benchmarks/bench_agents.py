"""Requests of many agents: ``python benchmarks/bench_agents.py [--nodes 10,100,1000] [--jobs 1000,10000]``.

Runs the parts of agents that use what all nodes share, in one process and with a simulated clock: the view of the
queue, the waker with its lease, and the reads of a node that prefetches. slurmctld is a client that counts. The
directory beside the shared store is a real one; reads and writes of signed files in it are counted.

``--idle`` is the share of nodes on which the idle window of a job is about to be full: only these request the queue. As
many jobs sleep. Prints, for a minute of the cluster: requests for the queue at slurmctld and the records in their
answers, and signed files read and written. The period of queue requests grows with the CPU time that an answer takes
(at most 0.4 % of a core): that of a record is measured first, with a recorded answer of Slurm.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurm_affinode.base.node_config import AgentConfig
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.model.cluster import Job
from slurm_affinode.slurm import scontrol
from slurm_affinode.suspension import slurm_queue, wake
from slurm_affinode.suspension.context import Location, SuspendSettings
from slurm_affinode.suspension.records import shared_state
from slurm_affinode.suspension.records.shared_state import Note, Notes
from slurm_affinode.suspension.slurm_queue import QueueView
from slurm_affinode.suspension.wake import JobWaker, Lease

KEY = bytes(64)
MINUTE_S = 60
BEGIN, MINUTES = 3, 10
START_S = 1_700_000_000.0


@dataclass(slots=True)
class Counts:
    """Of a minute."""

    queries: int = 0
    records: int = 0
    reads: int = 0
    writes: int = 0


@dataclass(slots=True)
class CountingClient:
    """slurmctld."""

    listed: tuple[Job, ...]
    counts: Counts
    cpu: SimulatedClock
    record_s: float
    """CPU seconds of a record."""

    def jobs(self) -> tuple[Job, ...]:
        """Return all jobs."""
        self.counts.queries += 1
        self.counts.records += len(self.listed)
        self.cpu.now_s += self.record_s * len(self.listed)
        return self.listed

    def nodes(self) -> tuple[Any, ...]:
        """Return no nodes: their number is that of the records of a request."""
        self.counts.queries += 1
        return ()


@dataclass(slots=True)
class SimulatedClock:
    """Seconds since the epoch."""

    now_s: float = START_S

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class SharedFiles:
    """Counts signed files that are read and written while it is active."""

    counts: Counts
    _original: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> SharedFiles:
        def reading(*arguments: Any, **more: Any) -> Any:
            self.counts.reads += 1
            return self._original["read_signed"](*arguments, **more)

        def writing(*arguments: Any, **more: Any) -> Any:
            self.counts.writes += 1
            return self._original["write_text"](*arguments, **more)

        self._original = {"read_signed": wake.read_signed, "write_text": wake.write_text}
        for module in (wake, shared_state):
            vars(module).update(read_signed=reading, write_text=writing)
        return self

    def __exit__(self, *error: object) -> None:
        for module in (wake, shared_state):
            vars(module).update(self._original)


def job(number: int, *, held: bool) -> Job:
    """Return a pending job."""
    values: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
    values |= {
        "job_id": number, "uid": 1000, "state": "PENDING", "is_held": held, "partitions": ("gpu",), "restarts": 1,
        "node_count": 1, "tres_requested": {}, "tres_allocated": {}, "node_gpus": (), "nodes": (), "steps": (),
        "nodes_required": (), "nodes_excluded": (),
    }  # fmt: skip
    return Job(**values)


def note(number: int) -> Note:
    """Return the note of a job that sleeps until its owner wakes it."""
    return Note(
        "bench", number, int(START_S), 1, 1, 1000, f"n{number}", round(START_S * 1000), START_S, "idle", 1, 0, 0, "hold"
    )


def record_s() -> float:
    """Return the CPU seconds for a record of ``scontrol --json show jobs``."""
    text = (Path(__file__).resolve().parents[1] / "tests/data/slurm/24.11/jobs.json").read_text(encoding="utf-8")
    begin, count = time.process_time(), 0
    for _ in range(100):
        count += len(scontrol.jobs(json.loads(text)["jobs"]))
    return (time.process_time() - begin) / count


def minute(nodes: int, jobs: int, idle: float, seconds: float) -> Counts:
    """Return the requests of a minute, on average over ten, after three in which the agents began.

    ``seconds``: CPU time of a record.
    """
    counts, clock, cpu = Counts(), SimulatedClock(), SimulatedClock(0.0)
    asleep = max(1, round(nodes * idle))
    listed = tuple(job(number, held=number <= asleep) for number in range(1, jobs + 1))
    client: Any = CountingClient(listed, counts, cpu, seconds)
    with tempfile.TemporaryDirectory() as name, SharedFiles(counts):
        root = Path(name)
        slurm_queue.time = SimpleNamespace(thread_time=cpu)
        for number in range(1, asleep + 1):
            Notes(root, Signer(KEY, "n0")).write(note(number))
        period_s = parse_span_s(AgentConfig().queue_period)
        views = [QueueView(lambda: client, period_s, clock=clock) for _ in range(asleep)]
        wakers = []
        for number in range(nodes):
            signer = Signer(KEY, f"n{number}")
            records: Any = SimpleNamespace(ledger=None, notes=Notes(root, signer))

            def own_notes(holds_lease: bool, at: int = number, notes: Notes = records.notes) -> None:
                notes.plan("bench")
                if 0 < at <= asleep:  # with an image on the node
                    notes.read("bench", at)

            wakers.append(JobWaker(
                location=Location("bench", signer.node), slurm=client, records=records, shared=None,
                settings=SuspendSettings(), lease=Lease.of(root, "bench", signer), tidy=own_notes, now=clock,
            ))  # fmt: skip
        for second in range((BEGIN + MINUTES) * MINUTE_S):
            clock.now_s = START_S + second
            if second == BEGIN * MINUTE_S:
                counts.queries = counts.records = counts.reads = counts.writes = 0
            for view in views:
                if view.due():
                    view.refresh()
            for waker in wakers:
                waker.tick()
        return Counts(*(round(getattr(counts, each.name) / MINUTES) for each in fields(Counts)))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,100,1000")
    parser.add_argument("--jobs", default="1000,10000")
    parser.add_argument("--idle", type=float, default=0.1)
    options = parser.parse_args()
    each = record_s()
    print(f"CPU time of a record: {each * 1e6:.0f} us\n")
    print("| nodes | jobs in the queue | requests to slurmctld | job records in answers | files read | files written |")
    print("| --- | --- | --- | --- | --- | --- |")
    for nodes in map(int, options.nodes.split(",")):
        for jobs in map(int, options.jobs.split(",")):
            load = minute(nodes, jobs, options.idle, each)
            print(f"| {nodes:,} | {jobs:,} | {load.queries:,} | {load.records:,} | {load.reads:,} | "
                  f"{load.writes:,} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
