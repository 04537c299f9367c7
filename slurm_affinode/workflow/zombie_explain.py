"""What ``zombies explain`` shows of one job: every finding, every GPU, every signature and why it does not fit, and the
time line. Also for a job of which nothing is found: then it says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis import squatters
from slurm_affinode.analysis.squatters import Held
from slurm_affinode.config import Config
from slurm_affinode.core.explanation import Explanation, GpuPage, Slot
from slurm_affinode.core.signature import Signature
from slurm_affinode.core.signature import judge as judge_gpu
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history.schema import ACTIVITY, percent
from slurm_affinode.history.store import SampleStore
from slurm_affinode.model.finding import KINDS, USER_KINDS, Finding, JobRef
from slurm_affinode.slurm import jobid
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import intake, zombies
from slurm_affinode.workflow.zombies import COLUMNS, Request, Slurm

SLOTS = 60
"""Columns of a time line."""
WHICH_UNKNOWN = "which GPUs the job has is not known: nothing is held against it"


class UnknownJobError(AffinodeError):
    """No run of the job is stored."""

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
    """The page of the last run of ``job`` (``123``, ``123_4``, ``123+1``). Raises ``UnknownJobError``."""
    moment = now or datetime.now(UTC)
    asked = parse(job)
    file = zombies.signatures(config)
    if window_s is not None:
        file = file.with_window(window_s)
    with (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as samples:
        with Repository.open(config.db_url, create=False) as store:
            stored = _pick(store.find_job(asked.job_id, cluster=cluster), asked)
            if stored.is_empty():
                raise UnknownJobError(
                    f"no run of job {job} is stored",
                    hint="is it one of yours, and was accounting taken in since (slurm-affinode ingest sacct)?",
                )
            row = stored.row(-1, named=True)
            query, notes = zombies.interval(config, Request(since, until), samples, moment)
            query = intake.with_known(query, store, moment)
            end = row["end"] or query.end_of(row["cluster"])
            begin, finish = since or row["start"], max(min(end, until or end), row["start"] + timedelta(seconds=1))
            # Who waited meanwhile may have started after the job's end.
            last = max(finish, query.until)
            jobs = store.jobs(begin, last, columns=COLUMNS)
            query = replace(query, since=begin, until=finish)
            gpus = store.allocation_gpus(begin, finish)
            pending = store.pending(last, columns=COLUMNS, since=begin)
        late = job_runs.caution(replace(query, until=until or moment), stored, moment) if row["end"] is None else ""
        notes += [late] if late else []
        held = zombies.hold(query, jobs, gpus, samples, file.signatures, moment)
        nodes, trouble = zombies.slurm_nodes(slurm)
        request = Request(kinds=tuple(kind for kind in KINDS if kind not in USER_KINDS))
        everything = zombies.judge(
            config, request, held, file.signatures, zombies.waiting(jobs, pending, query), nodes, notes=trouble
        )
        ref = squatters.run_ref(row, finish)
        findings = tuple(one for one in everything.findings if one.job is not None and _same(one.job, ref))
        run = _number_of(row, held)
        pages = _pages(row, run, held, file.signatures, findings, samples)
    if not pages and (row["gpus"] or 0) > 0:
        notes.append(WHICH_UNKNOWN)
    node_names = () if run is None else tuple(held.nodes.filter(pl.col("run") == run)["node"])
    return Explanation(
        ref, row["cluster"], row["user"], row["account"], row["partition"], row["qos"], node_names, row["gpus"],
        begin, finish, findings, pages, (*notes, *trouble), stored.height,
    )  # fmt: skip


def _number_of(row: dict[str, Any], held: Held) -> int | None:
    """The number of a run among those that are held; ``None``: it is not."""
    key = [pl.col(name) == row[name] for name in ("cluster", "job_id", "submit")]
    found = held.runs.filter(*key)["run"]
    return None if found.is_empty() else int(found[0])


def _pages(  # noqa: PLR0917
    row: dict[str, Any],
    run: int | None,
    held: Held,
    signatures: Sequence[Signature],
    findings: Sequence[Finding],
    samples: SampleStore,
) -> tuple[GpuPage, ...]:
    """Of each GPU of a run: what was seen, what every signature says of it, and the time line."""
    begin, finish = held.query.since, held.query.until
    facts = squatters.run_facts(row, finish)
    flagged = {(gpu.node, gpu.gpu) for one in findings for gpu in one.flagged_gpus}
    pages = []
    for pair, (of_run, at) in enumerate(held.pairs.select("run", "at").iter_rows()):
        if of_run != run:
            continue
        device = held.devices.row(at, named=True)
        limits_pct = [one.compute.at_most_pct for one in signatures]
        seen = [squatters.facts_of(held, limit_pct, pair)[0] for limit_pct in limits_pct]
        verdicts = tuple(judge_gpu(one, known, facts) for one, known in zip(signatures, seen, strict=True))
        # A file of signatures has at least one.
        gpu = squatters.gpu_evidence(held.followed[limits_pct[0]], pair, device, seen[0], flagged)
        gpu = replace(gpu, mapping=held.pairs["mapping"][pair])
        slots = _timeline(samples, device["device"], begin, finish, int(held.steps_ms[pair]),
                          held.query.thresholds.floors_pct)  # fmt: skip
        pages.append(GpuPage(gpu, verdicts, slots))
    return tuple(pages)


def parse(job: str) -> jobid.JobId:
    """The id as people write it. Raises ``AffinodeError``."""
    try:
        return jobid.parse(job)
    except ValueError as error:
        raise AffinodeError(str(error), hint="a job id is 123, 123_4 or 123+1") from None


def _pick(found: pl.DataFrame, asked: jobid.JobId) -> pl.DataFrame:
    started = found.drop_nulls("start").sort("start")
    if asked.array_task_id is not None:
        return started.filter(
            (pl.col("array_job_id") == asked.job_id) & (pl.col("array_task_id") == asked.array_task_id)
        )
    if asked.het_offset is not None:
        return started.filter((pl.col("het_job_id") == asked.job_id) & (pl.col("het_offset") == asked.het_offset))
    exact = started.filter(pl.col("job_id") == asked.job_id)
    return exact if exact.height else started


def _same(one: JobRef, other: JobRef) -> bool:
    return one.job_id == other.job_id and one.submit == other.submit


def grid(begin: datetime, finish: datetime, step_ms: int = 0) -> tuple[Slot, ...]:
    """``SLOTS`` stretches of equal length, of which nothing is known.

    Fewer where there would not be a sample in each: samples are ``step_ms`` apart, and not to the millisecond.
    """
    whole_ms = int((finish - begin).total_seconds() * 1000)
    count = max(1, min(SLOTS, whole_ms // max(1000, round(1.5 * step_ms))))
    each = timedelta(milliseconds=whole_ms / count)
    return tuple(Slot(begin + number * each, None, None, None) for number in range(count))


def _timeline(  # noqa: PLR0917
    history: SampleStore, device: int, begin: datetime, finish: datetime, step_ms: int, floors_pct: Mapping[str, float]
) -> tuple[Slot, ...]:  # fmt: skip
    """The grid with what is known of a GPU."""
    slots = grid(begin, finish, step_ms)
    each = (finish - begin).total_seconds() * 1000 / len(slots)
    start_ms = int(begin.timestamp() * 1000)
    busiest = pl.max_horizontal(percent(name, floors_pct).mean() for name in ACTIVITY)
    frame = (
        history.scan(begin, finish)
        .filter(pl.col("device") == device)
        .with_columns(((pl.col("time").dt.epoch("ms") - start_ms) / each).floor().cast(pl.Int64).alias("slot"))
        .group_by("slot")
        .agg(busiest.alias("activity"), pl.col("fb_used_mib").mean(), pl.col("power_w").mean())
        .collect()
    )
    known = {row["slot"]: row for row in frame.iter_rows(named=True)}
    return tuple(_filled(slot, known.get(number)) for number, slot in enumerate(slots))


def _filled(slot: Slot, row: dict[str, Any] | None) -> Slot:
    if row is None:
        return slot
    fb = None if row["fb_used_mib"] is None else row["fb_used_mib"] / 1024
    return Slot(slot.start, row["activity"], fb, row["power_w"])
