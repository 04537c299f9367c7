"""The page of a job as it is now: as Slurm shows it, its GPUs looked at, and what a history says of the time before.

For whoever may not read the site's store, too, its owner first of all: accounting is a store of this command alone,
filled with what slurmctld knows; what the GPUs did comes from Prometheus or a stored history, where one can be read.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

from slurm_affinode.config import Config
from slurm_affinode.core.explanation import Explanation, GpuPage, Slot
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import CPU_KINDS, IDLE_KINDS, KINDS, USER_KINDS, Finding
from slurm_affinode.slurm.schema import ALLOCATION_GPUS
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import intake, zombie_explain, zombie_live, zombies
from slurm_affinode.workflow import zombie_live_misfits as live
from slurm_affinode.workflow.zombie_live import Observed
from slurm_affinode.workflow.zombie_look import LOOK_S, Eyes
from slurm_affinode.workflow.zombie_nodes import LiveGpu
from slurm_affinode.workflow.zombies import History, Request, Slurm, Snapshot

STEP_MS = round(LOOK_S * 1000)
LONGEST_S = 120.0
"""So long it is looked without being asked to, where the window of a signature is no longer."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Readings of the looks, by GPU."""

    rows: dict[tuple[str, str], list[tuple[float, LiveGpu]]] = field(default_factory=dict)

    def __call__(self, at: float, gpus: Iterable[LiveGpu]) -> None:
        for gpu in gpus:
            self.rows.setdefault(gpu.key, []).append((at, gpu))


def explain(
    config: Config,
    job: str,
    eyes: Eyes,
    *,
    slurm: Slurm,
    since: datetime | None = None,
    until: datetime | None = None,
    window_s: float | None = None,
    watch_s: float | None = None,
    history: History | None = None,
) -> Explanation:
    """The page of ``job`` now. ``watch_s``: look for so long; else for the shortest window, up to ``LONGEST_S``.

    Raises ``zombie_explain.UnknownJobError`` where slurmctld does not know that it has started.
    """
    asked = zombie_explain.parse(job)
    kinds = tuple(kind for kind in KINDS if kind not in CPU_KINDS | USER_KINDS)
    request = Request(since=since, window_s=window_s, kinds=kinds)
    if watch_s is None:
        file = zombies.signatures(config)
        shortest = (
            min((one.time.longer_than_s for one in file.signatures), default=0.0) if window_s is None else window_s
        )
        watch_s = shortest + LOOK_S if shortest <= LONGEST_S else None
    seen = _Seen()

    def running(jobs: Sequence[Job]) -> list[Job]:
        number = asked.job_id
        return [one for one in jobs if one.state == "RUNNING"
                and number in (one.job_id, one.array_job_id, one.het_job_id)]  # fmt: skip

    looked = replace(eyes, told=seen)
    with zombie_live.observe(
        config, request, looked, slurm=slurm, watch_s=watch_s, history=history, only=running
    ) as now:  # fmt: skip
        try:
            with _store(config, now.snapshot, now.at) as made:
                page = zombie_explain.explain(
                    made, job, since=since, until=until or now.at, window_s=window_s, now=now.at,
                    slurm=lambda: contextlib.nullcontext(_Nodes(now.snapshot)),  # type: ignore[arg-type, return-value]
                    history=lambda: contextlib.nullcontext(now.history),
                )  # fmt: skip
        except zombie_explain.UnknownJobError:
            raise zombie_explain.UnknownJobError(
                f"Slurm knows no job {job} that has started",
                hint="does it still wait (squeue), or did it end a while ago? Then it is stored: leave out --live",
            ) from None
        one = next((each for each in now.snapshot.jobs if each.job_id == page.job.job_id), None)
        if one is None or one.state != "RUNNING":
            return page
        return _with_now(page, one, now, seen, zombie_live.judged(config, request, now))


@dataclass(frozen=True, slots=True)
class _Nodes:
    """What was asked already."""

    snapshot: Snapshot

    def nodes(self) -> tuple[Node, ...]:
        return self.snapshot.nodes


def _with_now(page: Explanation, job: Job, now: Observed, seen: _Seen, found: zombies.Found) -> Explanation:
    """What the look saw, in place of how it was when the history ended."""
    on = now.looks.mine.get(job.job_id, ())
    measured = any(now.looks.watched[gpu.key].gpu.signals_pct for gpu in on)
    mine = [one for one in found.findings if one.job is not None and one.job.job_id == job.job_id]
    kinds = {one.kind for one in mine}
    before = [one for one in page.findings if one.kind not in kinds and not (measured and one.kind in IDLE_KINDS)]
    outdated = {zombie_explain.WHICH_UNKNOWN} if on else set()
    outdated |= {zombies.NO_HISTORY} if measured else set()
    notes = [note for note in page.notes if note not in outdated]
    pages = tuple(_gpu(page, job, now, seen, gpu, mine) for gpu in on) if measured or not page.gpus else page.gpus
    return replace(
        page, findings=(*mine, *before), gpus=pages, watched_s=now.looks.watched_s,
        notes=tuple(dict.fromkeys((*notes, *found.notes))),
        allocated_gpus=page.allocated_gpus or len(on) or page.allocated_gpus,
    )  # fmt: skip


def _gpu(  # noqa: PLR0917
    page: Explanation, job: Job, now: Observed, seen: _Seen, gpu: LiveGpu, found: Sequence[Finding]
) -> GpuPage:
    sight, verdicts = zombie_live.see(job, now.looks.watched[gpu.key], now, gpu.mapping)
    known = next(
        (one.slots for one in page.gpus if one.gpu.node == gpu.node
         and (one.gpu.uuid == gpu.uuid if one.gpu.uuid and gpu.uuid else one.gpu.gpu == sight.gpu.gpu)), None,
    )  # fmt: skip
    flagged = any(one.kind in IDLE_KINDS for one in found) and sight.verdict is not None
    # The history of a shared GPU is that of everybody on it.
    before = zombie_explain.grid(page.since, page.until, STEP_MS) if known is None or gpu.part_of is not None else known
    slots = _with_looks(before, page.until, seen.rows.get(gpu.key, ()))
    return GpuPage(replace(sight.gpu, flagged=flagged), verdicts, slots)


def _with_looks(
    slots: Sequence[Slot], until: datetime, looks: Sequence[tuple[float, LiveGpu]]
) -> tuple[Slot, ...]:  # fmt: skip
    """``slots`` with the looks where nothing else is known."""
    ends = [*(slot.start for slot in slots[1:]), until + timedelta(seconds=1)]
    made = []
    for slot, end in zip(slots, ends, strict=True):
        here = [gpu for at, gpu in looks if slot.start.timestamp() <= at < end.timestamp()]
        if slot.activity_pct is not None or not here:
            made.append(slot)
            continue
        busy = [max(gpu.signals_pct.values()) for gpu in here if gpu.signals_pct]
        held = [gpu.used_mib / 1024 for gpu in here if gpu.used_mib is not None]
        watts = [gpu.power_w for gpu in here if gpu.power_w is not None]
        made.append(Slot(slot.start, _mean(busy), _mean(held), _mean(watts)))
    return tuple(made)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@contextlib.contextmanager
def _store(config: Config, snapshot: Snapshot, at: datetime) -> Iterator[Config]:
    """A configuration whose store holds what Slurm says now."""
    history = config.history_dir
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        url = f"sqlite:///{Path(directory) / 'now.sqlite'}"
        with Repository.open(url) as store:
            store.upsert(pl.concat([live.frame(snapshot, {}), live.pending(snapshot)]))
            store.upsert_allocation_gpus(allocations(snapshot))
            intake.reached(store, at, [snapshot.cluster])
        made = replace(config, store=replace(config.store, db=url))
        assert made.history_dir == history  # noqa: S101 - it is beside the state, not beside the store
        yield made


def allocations(snapshot: Snapshot) -> pl.DataFrame:
    """Which GPUs the running jobs have, by Slurm's numbers."""
    rows = [
        (snapshot.cluster, job.job_id, None, one.node, str(index))
        for job in snapshot.jobs for one in job.node_gpus or () for index in one.indices
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=ALLOCATION_GPUS, orient="row")
