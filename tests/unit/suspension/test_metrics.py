"""The agent's metrics of itself: names, phases, stores, requests to Slurm."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_affinode.base.counters import Counters
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.interface import NoRoom, Usage
from slurm_affinode.model.suspension import JobKey, Phase
from slurm_affinode.slurm.interface import ControllerDownError
from slurm_affinode.suspension import metrics
from slurm_affinode.suspension.records.journal import Journal

UNITS = ("_seconds", "_bytes")


def value(counters: Counters, name: str, **labels: str) -> float | None:
    for family in counters.families():
        if family["name"] == name:
            return next((number for result, number in family["samples"] if result == labels), None)
    return None


def test_names_follow_the_conventions_of_prometheus() -> None:
    """Counters end with ``_total``, and units are seconds and bytes, at the end of the name."""
    for metric in metrics.METRICS:
        assert re.fullmatch(r"slurm_affinode_agent(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") is (metric.kind == "counter"), metric.name
        for unit in UNITS:
            assert unit not in metric.name.removesuffix("_total").removesuffix(unit), metric.name
        assert not metric.help.endswith("."), metric.name


def test_phases_and_their_seconds_come_from_the_journal(tmp_path: Path) -> None:
    """Further facts of a phase do not begin it again; the last phase ends when the journal is closed."""
    now = [1000.0]
    counters = metrics.agent_counters("1.0", 0.0)
    journal = Journal(tmp_path / "j", clock=lambda: now[0], observe=metrics.phase_observer(counters))
    job = journal.of_job(JobKey("c", 7, 5))
    job.write(Phase.LOCKING)
    now[0] += 2
    job.write(Phase.LOCKED)
    now[0] += 1
    job.write(Phase.LOCKED)
    now[0] += 3
    job.write(Phase.PARKED)
    now[0] += 0.5
    job.close()
    job.close()
    result = {phase: value(counters, metrics.PHASE_SECONDS, phase=phase) for phase in ("locking", "locked", "parked")}
    assert result == {"locking": 2.0, "locked": 4.0, "parked": 0.5}
    begun = [value(counters, metrics.PHASES_BEGUN, phase=phase) for phase in ("locking", "locked", "parked", "dumping")]
    assert begun == [1.0, 1.0, 1.0, 0.0]


def test_requests_to_slurm_are_counted_by_outcome() -> None:
    """A refusal of Slurm is a response; only an unreachable slurmctld is down."""
    counters = metrics.agent_counters("1.0", 0.0)

    def fail(error: AffinodeError) -> None:
        raise error

    client: Any = metrics.counted(
        lambda: SimpleNamespace(  # type: ignore[arg-type,return-value]
            backend="commands", jobs=lambda: (1,), job=lambda number: fail(AffinodeError("no such job")),
            ping=lambda: fail(ControllerDownError("down")), close=lambda: None,
        ),
        counters,
    )()  # fmt: skip
    assert client.jobs() == (1,)
    assert client.backend == "commands"
    with pytest.raises(AffinodeError, match="no such job"):
        client.job(3)
    assert value(counters, metrics.SLURM_UP) == 1.0
    with pytest.raises(ControllerDownError):
        client.ping()
    client.close()
    assert value(counters, metrics.SLURM_UP) == 0.0
    outcomes = {("jobs", "ok"), ("job", "refused"), ("ping", "unreachable")}
    for operation, outcome in outcomes:
        assert value(counters, metrics.SLURM_QUERIES, operation=operation, outcome=outcome) == 1.0
        assert value(counters, metrics.SLURM_SECONDS, operation=operation) is not None
    assert value(counters, metrics.SLURM_SECONDS, operation="close") is None


class Store:
    """A store with 30 bytes in use and 70 left."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.reads = 0
        self.budget = SimpleNamespace(available_bytes=lambda usage: usage.free - 10)

    def usage(self) -> Usage:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return Usage(30, 80, None, {}, 2)

    def aside(self) -> list[str]:
        return ["c.7/0001.1.bad"]


def test_shared_store_is_read_by_the_holder_of_the_lease_only() -> None:
    clock = [0.0]
    disk, shared = Store(), Store()
    tiers = SimpleNamespace(
        tiers=[SimpleNamespace(name=name, shared=name == "shared", store=store)
               for name, store in (("disk", disk), ("shared", shared))]
    )  # fmt: skip
    counters = metrics.agent_counters("1.0", 0.0)
    reader = metrics.StoreReader(counters, tiers, clock=lambda: clock[0])  # type: ignore[arg-type]
    reader.read(holds_lease=True)
    names = (metrics.IMAGES, metrics.IMAGES_DAMAGED, metrics.IMAGE_BYTES, metrics.STORE_LEFT)
    assert [value(counters, name, tier="disk") for name in names] == [2.0, 1.0, 30.0, 70.0]
    assert [value(counters, name, tier="shared") for name in names] == [2.0, 1.0, 30.0, 70.0]
    reader.read(holds_lease=False)
    assert disk.reads == 1, "it is not read again within the interval"
    clock[0] += metrics.STORES_S
    disk.error = NoRoom("it cannot be read")
    reader.read(holds_lease=False)
    assert [value(counters, name, tier="disk") for name in names] == [None] * 4
    assert [value(counters, name, tier="shared") for name in names] == [None] * 4
    assert shared.reads == 1


def test_process_is_measured() -> None:
    counters = metrics.agent_counters("1.0", 0.0)
    metrics.read_process(counters)
    assert (value(counters, metrics.MEMORY) or 0) > 1 << 20
    assert (value(counters, metrics.THREADS) or 0) >= 1
    assert (value(counters, metrics.CPU) or 0) > 0
