"""``zombies explain``: every finding, GPU and signature of one job with reasons, and its timeline, stored or live.

It also explains why a job has no finding. Users without access to the site's database can explain their own live jobs:
accounting then comes from slurmctld, and GPU samples from Prometheus or a readable sample store.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis import squatters, suspensions
from slurm_affinode.analysis.samples import naming_damage
from slurm_affinode.analysis.squatters import HeldGpus
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.core.explanation import Explanation, GpuPage, Slot
from slurm_affinode.core.finding_texts import TEXTS, advice
from slurm_affinode.core.signatures import Signature
from slurm_affinode.core.signatures import judge as judge_gpu
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import ACTIVITY, percent
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import CPU_KINDS, IDLE_KINDS, KINDS, USER_KINDS, Finding, JobAttempt
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.pipeline import stored_accounting
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS
from slurm_affinode.suspension import messages
from slurm_affinode.zombies import find, live
from slurm_affinode.zombies import nodes as zombie_nodes
from slurm_affinode.zombies.find import COLUMNS, History, Request, Slurm, Snapshot
from slurm_affinode.zombies.live import Observed
from slurm_affinode.zombies.nodes import LiveGpu
from slurm_affinode.zombies.sampling import SAMPLING_S, NodeSampler

SLOTS = 60
"""Columns of a timeline."""
WHICH_UNKNOWN = TEXTS.text("explanation.which-unknown", {})


class NoAttemptError(AffinodeError):
    """No attempt of the job is stored."""

    exit_code = 1


def explain(
    config: Config,
    job: str,
    *,
    cluster: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    window_s: float | None = None,
    history: Callable[[], AbstractContextManager[SampleStore]] | None = None,
    slurm: Slurm | None = None,
    now: datetime | None = None,
) -> Explanation:
    """Explain the last attempt of ``job`` (``123``, ``123_4``, ``123+1``). Raises ``NoAttemptError``.

    Raises ``AffinodeError`` if several jobs have this ID.
    """
    moment = now or datetime.now(UTC)
    parsed = parse(job)
    file = find.site_signatures(config)
    if window_s is not None:
        file = file.with_window(window_s)
    with (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as samples:
        with Repository.open(config.db_url, create=False) as store:
            stored = pick(store.find_job(parsed.job_id, cluster=cluster), parsed)
            if stored.is_empty():
                raise NoAttemptError(
                    f"no attempt of job {job} is stored",
                    hint="is it one of yours, and was accounting ingested since (slurm-affinode ingest sacct)?",
                )
            check_single(job, stored)
            row = stored.row(-1, named=True)
            query, notes = find.interval(config, Request(since, until), samples, moment)
            query = stored_accounting.with_known(query, store, moment)
            end = row["end"] or query.end_of(row["cluster"])
            begin, finish = since or row["start"], max(min(end, until or end), row["start"] + timedelta(seconds=1))
            # Jobs that waited meanwhile may have started after this job's end.
            last = max(finish, query.until)
            jobs = store.jobs(begin, last, columns=COLUMNS)
            query = replace(query, since=begin, until=finish)
            gpus = store.allocation_gpus(begin, finish)
            pending = store.pending(last, columns=COLUMNS, since=begin)
            asleep = row["end"] is None and _sleeps(store.suspensions(begin, finish), row)
        late = job_runs.caution(replace(query, until=until or moment), stored, moment) if row["end"] is None else ""
        notes += [late] if late else []
        held_gpus = find.hold(query, jobs, gpus, samples, file.signatures, moment)
        nodes, trouble = find.slurm_nodes(slurm)
        kinds = tuple(kind for kind in KINDS if kind not in USER_KINDS)
        request = Request(kinds=kinds, clusters=(row["cluster"],))
        everything = find.judge(
            config, request, held_gpus, file.signatures, find.waiting_jobs(jobs, pending, query), nodes, notes=trouble
        )
        ref = squatters.run_ref(row, finish)
        findings = tuple(
            finding for finding in everything.findings if finding.job is not None and _is_same_attempt(finding.job, ref)
        )
        run = _number_of(row, held_gpus)
        pages = _pages(row, run, held_gpus, file.signatures, findings, samples)
    if not pages and (row["gpus"] or 0) > 0:
        notes.append(WHICH_UNKNOWN)
    node_names = () if run is None else tuple(held_gpus.nodes.filter(pl.col("run") == run)["node"])
    page = Explanation(
        ref, row["cluster"], row["user"], row["account"], row["partition"], row["qos"], node_names, row["gpus"],
        begin, finish, findings, pages, (*notes, *trouble), stored.height,
    )  # fmt: skip
    return _asleep(page) if asleep else page


def _sleeps(entries: Iterable[LedgerEntry], row: Mapping[str, Any]) -> bool:
    """Return whether the job of a row slept in place at last, by the ledgers of the agents."""
    of_job = [entry for entry in entries if (entry.cluster, entry.job_id) == (row["cluster"], row["job_id"])]
    last = max(of_job, key=lambda entry: entry.began_ms, default=None)
    return last is not None and last.mode == "inplace" and suspensions.outcome(last) in ("asleep", "restoring")


def _asleep(page: Explanation) -> Explanation:
    """Return the page of a job that sleeps in place: that its GPUs are idle is no fault of its program."""
    findings = [
        replace(finding, advice=advice("idle.advice-asleep")) if finding.kind in IDLE_KINDS else finding
        for finding in page.findings
    ]
    return replace(page, findings=tuple(findings), asleep=True)


def _number_of(row: dict[str, Any], gpus: HeldGpus) -> int | None:
    """Return the number of an attempt in ``held.runs``, or ``None``."""
    key = [pl.col(name) == row[name] for name in ("cluster", "job_id", "submit")]
    numbers = gpus.runs.filter(*key)["run"]
    return None if numbers.is_empty() else int(numbers[0])


def _pages(  # noqa: PLR0917
    row: dict[str, Any],
    run: int | None,
    gpus: HeldGpus,
    signatures: Sequence[Signature],
    findings: Sequence[Finding],
    samples: SampleStore,
) -> tuple[GpuPage, ...]:
    """Return, for each GPU of an attempt, the measurements, the verdict of every signature, and the timeline."""
    begin, finish = gpus.query.since, gpus.query.until
    facts = squatters.run_facts(row, finish)
    flagged = {(gpu.node, gpu.gpu) for finding in findings for gpu in finding.flagged_gpus}
    pages = []
    for pair, (of_run, device_row) in enumerate(gpus.pairs.select("run", "at").iter_rows()):
        if of_run != run:
            continue
        device = gpus.devices.row(device_row, named=True)
        limits_pct = [signature.compute.at_most_pct for signature in signatures]
        gpu_facts = [squatters.facts_of(gpus, limit_pct, pair)[0] for limit_pct in limits_pct]
        verdicts = tuple(
            judge_gpu(signature, facts_known, facts)
            for signature, facts_known in zip(signatures, gpu_facts, strict=True)
        )
        # A file of signatures has at least one.
        gpu = squatters.gpu_evidence(gpus.followed[limits_pct[0]], pair, device, gpu_facts[0], flagged)
        gpu = replace(gpu, mapping=gpus.pairs["mapping"][pair])
        slots = _timeline(samples, device["device"], begin, finish, int(gpus.steps_ms[pair]),
                          gpus.query.thresholds.floors_pct)  # fmt: skip
        pages.append(GpuPage(gpu, verdicts, slots))
    return tuple(pages)


def parse(job: str) -> identifiers.JobId:
    """Parse a job ID as users write it. Raises ``AffinodeError``."""
    try:
        return identifiers.parse(job)
    except ValueError as error:
        raise AffinodeError(str(error), hint="a job ID is 123, 123_4 or 123+1") from None


def pick(attempts: pl.DataFrame, parsed: identifiers.JobId) -> pl.DataFrame:
    """Return the attempts (``JOBS``) in ``attempts`` that have started and that a job ID names, oldest first."""
    started = attempts.drop_nulls("start").sort("start")
    if parsed.array_task_id is not None:
        return started.filter(
            (pl.col("array_job_id") == parsed.job_id) & (pl.col("array_task_id") == parsed.array_task_id)
        )
    if parsed.het_offset is not None:
        return started.filter((pl.col("het_job_id") == parsed.job_id) & (pl.col("het_offset") == parsed.het_offset))
    exact = started.filter(pl.col("job_id") == parsed.job_id)
    return exact if exact.height else started


def check_single(job: str, stored: pl.DataFrame) -> None:
    """Raise ``AffinodeError`` if ``stored`` are runs of several jobs."""
    clusters = sorted(stored["cluster"].unique())
    if len(clusters) > 1:
        raise AffinodeError(f"several clusters have a job {job}: {', '.join(clusters)}", hint="choose one: --cluster")
    if (count := stored["job_id"].n_unique()) > 1:
        raise AffinodeError(f"{job} is {count} jobs", hint=f"name one of them, such as {job}_1 or {job}+1")


def _is_same_attempt(attempt: JobAttempt, reference: JobAttempt) -> bool:
    return attempt.job_id == reference.job_id and attempt.submit == reference.submit


def grid(begin: datetime, finish: datetime, step_ms: int = 0) -> tuple[Slot, ...]:
    """Return ``SLOTS`` empty slots of equal length.

    There are fewer if not every slot would contain a sample: samples are roughly ``step_ms`` apart.
    """
    whole_ms = int((finish - begin).total_seconds() * 1000)
    count = max(1, min(SLOTS, whole_ms // max(1000, round(1.5 * step_ms))))
    each = timedelta(milliseconds=whole_ms / count)
    return tuple(Slot(begin + number * each, None, None, None) for number in range(count))


def _timeline(  # noqa: PLR0917
    history: SampleStore, device: int, begin: datetime, finish: datetime, step_ms: int, floors_pct: Mapping[str, float]
) -> tuple[Slot, ...]:  # fmt: skip
    """Return the slots filled with the samples of a GPU."""
    slots = grid(begin, finish, step_ms)
    each = (finish - begin).total_seconds() * 1000 / len(slots)
    start_ms = epoch_ms(begin)
    busiest = pl.max_horizontal(percent(name, floors_pct).mean() for name in ACTIVITY)
    rows = (
        history.scan(begin, finish)
        .filter(pl.col("device") == device)
        .with_columns(((pl.col("time").dt.epoch("ms") - start_ms) / each).floor().cast(pl.Int64).alias("slot"))
        .group_by("slot")
        .agg(busiest.alias("activity"), pl.col("fb_used_mib").mean(), pl.col("power_w").mean())
    )
    with naming_damage(history, begin, finish):
        frame = rows.collect()
    row_by_slot = {row["slot"]: row for row in frame.iter_rows(named=True)}
    return tuple(_filled(slot, row_by_slot.get(number)) for number, slot in enumerate(slots))


def _filled(slot: Slot, row: dict[str, Any] | None) -> Slot:
    if row is None:
        return slot
    fb = None if row["fb_used_mib"] is None else row["fb_used_mib"] / 1024
    return Slot(slot.start, row["activity"], fb, row["power_w"])


STEP_MS = round(SAMPLING_S * 1000)
LONGEST_S = 120.0
"""Maximum default observation time, seconds: if the shortest signature window is longer, the GPUs are read once."""


@dataclass(frozen=True, slots=True)
class _Readings:
    """Live readings by GPU, each with its time."""

    rows: dict[tuple[str, str], list[tuple[float, LiveGpu]]] = field(default_factory=dict)

    def __call__(self, time_s: float, gpus: Iterable[LiveGpu]) -> None:
        for gpu in gpus:
            self.rows.setdefault(gpu.key, []).append((time_s, gpu))


def explain_live(
    config: Config,
    job: str,
    sampler: NodeSampler,
    *,
    slurm: Slurm,
    since: datetime | None = None,
    until: datetime | None = None,
    window_s: float | None = None,
    watch_s: float | None = None,
    history: History | None = None,
    sleeps: Callable[[Config, str, int], bool] = zombie_nodes.sleeps,
) -> Explanation:
    """Explain the running attempt of ``job`` from live data.

    ``watch_s``: observation time; by default the shortest signature window if that is at most ``LONGEST_S``.
    ``sleeps``: returns whether a node's agent knows that a job sleeps in place.

    Raises ``NoAttemptError`` if slurmctld knows no such job that has started.
    """
    parsed = parse(job)
    kinds = tuple(kind for kind in KINDS if kind not in CPU_KINDS | USER_KINDS)
    request = Request(since=since, window_s=window_s, kinds=kinds)
    if watch_s is None:
        file = find.site_signatures(config)
        shortest = (
            min((signature.time.longer_than_s for signature in file.signatures), default=0.0)
            if window_s is None
            else window_s
        )
        watch_s = shortest + SAMPLING_S if shortest <= LONGEST_S else None
    readings = _Readings()

    def running(jobs: Sequence[Job]) -> list[Job]:
        number = parsed.job_id
        return [candidate for candidate in jobs if candidate.state == "RUNNING"
                and number in (candidate.job_id, candidate.array_job_id, candidate.het_job_id)]  # fmt: skip

    looked = replace(sampler, on_round=readings)
    with live.observe(
        config, request, looked, slurm=slurm, watch_s=watch_s, history=history, only=running
    ) as now:  # fmt: skip
        try:
            with temporary_store(config, now.snapshot, now.time) as temporary_config:
                page = explain(
                    temporary_config, job, since=since, until=until or now.time, window_s=window_s, now=now.time,
                    slurm=lambda: contextlib.nullcontext(SnapshotNodes(now.snapshot)),  # type: ignore[arg-type, return-value]
                    history=lambda: contextlib.nullcontext(now.history),
                )  # fmt: skip
        except NoAttemptError:
            raise NoAttemptError(
                f"Slurm knows no job {job} that has started",
                hint="is it still pending (squeue), or did it end a while ago? Then use stored data: omit --live",
            ) from None
        current = next((each for each in now.snapshot.jobs if each.job_id == page.job.job_id), None)
        if current is None or current.state != "RUNNING":
            return page
        page = _with_now(page, current, now, readings, live.judged(config, request, now))
        # Users can change the comment: it only tells whether to ask.
        asleep = messages.sleeps_in_place(current.comment)
        return _asleep(page) if asleep and any(sleeps(config, name, current.job_id) for name in current.nodes) else page


@dataclass(frozen=True, slots=True)
class SnapshotNodes:
    """A Slurm client that serves the nodes of a snapshot."""

    snapshot: Snapshot

    def nodes(self) -> tuple[Node, ...]:
        return self.snapshot.nodes


def _with_now(
    page: Explanation, job: Job, now: Observed, readings: _Readings, assessment: find.Assessment
) -> Explanation:
    """Replace the outdated parts of a page from stored samples with live readings."""
    on = now.samples.by_job.get(job.job_id, ())
    measured = any(now.samples.watched[gpu.key].gpu.signals_pct for gpu in on)
    findings = [
        finding for finding in assessment.findings if finding.owner is not None and finding.owner.job_id == job.job_id
    ]
    kinds = {finding.kind for finding in findings}
    before = [
        finding
        for finding in page.findings
        if finding.kind not in kinds and not (measured and finding.kind in IDLE_KINDS)
    ]
    outdated = {WHICH_UNKNOWN} if on else set()
    outdated |= {find.NO_HISTORY} if measured else set()
    notes = [note for note in page.notes if note not in outdated]
    pages = (
        tuple(_gpu(page, job, now, readings, gpu, findings) for gpu in on) if measured or not page.gpus else page.gpus
    )
    return replace(
        page, findings=(*findings, *before), gpus=pages, watched_s=now.samples.watched_s,
        notes=tuple(dict.fromkeys((*notes, *assessment.notes))),
        allocated_gpus=page.allocated_gpus or len(on) or page.allocated_gpus,
    )  # fmt: skip


def _gpu(  # noqa: PLR0917
    page: Explanation, job: Job, now: Observed, readings: _Readings, gpu: LiveGpu, findings: Sequence[Finding]
) -> GpuPage:
    watched = now.samples.watched[gpu.key]
    sight, verdicts = live.see(job, watched, now, gpu.mapping), live.verdicts(job, watched, now)
    match = next(
        (shown.slots for shown in page.gpus if shown.gpu.node == gpu.node
         and (shown.gpu.uuid == gpu.uuid if shown.gpu.uuid and gpu.uuid else shown.gpu.gpu == sight.gpu.gpu)), None,
    )  # fmt: skip
    flagged = any(finding.kind in IDLE_KINDS for finding in findings) and sight.verdict is not None
    # Stored samples of a shared GPU are of all jobs on it.
    before = grid(page.since, page.until, STEP_MS) if match is None or gpu.part_of is not None else match
    slots = _with_samples(before, page.until, readings.rows.get(gpu.key, ()))
    return GpuPage(replace(sight.gpu, flagged=flagged), verdicts, slots)


def _with_samples(
    slots: Sequence[Slot], until: datetime, node_samples: Sequence[tuple[float, LiveGpu]]
) -> tuple[Slot, ...]:  # fmt: skip
    """Return ``slots`` with live readings in the slots that have no stored activity."""
    ends = [*(slot.start for slot in slots[1:]), until + timedelta(seconds=1)]
    filled_slots = []
    for slot, end in zip(slots, ends, strict=True):
        slot_gpus = [gpu for time_s, gpu in node_samples if slot.start.timestamp() <= time_s < end.timestamp()]
        if slot.activity_pct is not None or not slot_gpus:
            filled_slots.append(slot)
            continue
        busy = [max(gpu.signals_pct.values()) for gpu in slot_gpus if gpu.signals_pct]
        used_gib = [gpu.used_mib / 1024 for gpu in slot_gpus if gpu.used_mib is not None]
        watts = [gpu.power_w for gpu in slot_gpus if gpu.power_w is not None]
        filled_slots.append(Slot(slot.start, _mean(busy), _mean(used_gib), _mean(watts)))
    return tuple(filled_slots)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@contextlib.contextmanager
def temporary_store(config: Config, snapshot: Snapshot, moment: datetime) -> Iterator[Config]:
    """Yield a configuration with a temporary database that holds the jobs of the snapshot."""
    history = config.history_dir
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        url = f"sqlite:///{Path(directory) / 'now.sqlite'}"
        with Repository.open(url) as store:
            store.upsert(pl.concat([live.frame(snapshot, {}), live.pending(snapshot)]))
            store.upsert_allocation_gpus(allocations(snapshot))
            stored_accounting.reached(store, moment, [snapshot.cluster])
        temporary_config = replace(config, store=replace(config.store, db=url))
        assert temporary_config.history_dir == history  # noqa: S101 - it is beside the state, not beside the store
        yield temporary_config


def allocations(snapshot: Snapshot) -> pl.DataFrame:
    """Return the GPUs allocated to running jobs (``ALLOCATION_GPUS``), by Slurm's indices."""
    rows = [
        (snapshot.cluster, job.job_id, job.start, gpu.node, str(index))
        for job in snapshot.jobs for gpu in job.node_gpus or () for index in gpu.indices
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=ALLOCATION_GPUS, orient="row")
