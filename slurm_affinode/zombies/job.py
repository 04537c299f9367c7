"""``job`` for one attempt, and for all attempts that the nightly run publishes: accounting, GPU samples and findings.

Attempts are summarized together: one read of accounting and two passes over the samples serve all of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

from slurm_affinode.analysis import gpu_tracks, job_use, misfits, squatters, suspensions
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.gpu_tracks import GpuTrack
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.analysis.squatters import HeldGpus
from slurm_affinode.base import process
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted, span, visible
from slurm_affinode.base.times import named, parse_span_s, utc
from slurm_affinode.core import admin_comment
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import KINDS, LIVE_KINDS, USER_KINDS, Finding
from slurm_affinode.model.job_summary import GpuUse, JobFinding, JobSummary, JobSuspension
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.pipeline import job_files, report, stored_accounting
from slurm_affinode.slurm import hostlist
from slurm_affinode.slurm.accounting import sacct, sacct_command
from slurm_affinode.slurm.accounting.sacct import SacctReading
from slurm_affinode.slurm.accounting.schema import JOB_KEY
from slurm_affinode.slurm.client import open_client
from slurm_affinode.slurm.interface import Runner
from slurm_affinode.slurm.times import site_zone
from slurm_affinode.zombies import explain, find, live
from slurm_affinode.zombies.explain import NoAttemptError
from slurm_affinode.zombies.find import COLUMNS, History, Request, Slurm
from slurm_affinode.zombies.nodes import LiveGpu
from slurm_affinode.zombies.sampling import NodeSampler

_KINDS = frozenset(KINDS) - USER_KINDS - LIVE_KINDS
_OTHER_USERS = "{count} attempts of job {job} are stored, of different users: the ID was used again"


def summarize(
    config: Config,
    job: str,
    *,
    cluster: str | None = None,
    attempt: int | None = None,
    history: History | None = None,
    slurm: Slurm | None = None,
    now: datetime | None = None,
) -> JobSummary:
    """Summarize an attempt of ``job`` (``123``, ``123_4``, ``123+1``) from stored data.

    ``attempt``: its number, from 1, negative from the end; ``None``: the last one. Raises ``NoAttemptError`` if there
    is none, and ``AffinodeError`` if several jobs have this ID.
    """
    moment = now or datetime.now(UTC)
    parsed = explain.parse(job)
    with (
        (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as samples,
        Repository.open(config.db_url, create=False) as store,
    ):
        every = store.find_job(parsed.job_id, cluster=cluster)
        stored = explain.pick(every, parsed)
        if stored.is_empty():
            raise _missing(job, every, config)
        explain.check_single(job, stored)
        number = chosen_attempt(job, stored.height, attempt)
        # Without nodes, the rules about a share of a node are not applied; that is no fault of the job's data.
        nodes, _ = find.slurm_nodes(slurm)
        [summary] = summaries(config, store, samples, stored[number - 1], moment, nodes=nodes)
    several = stored["user"].drop_nulls().n_unique() > 1
    notes = [_OTHER_USERS.format(count=stored.height, job=job)] if several else []
    return replace(summary, attempt=number, attempts=stored.height, notes=(*summary.notes, *notes))


def chosen_attempt(job: str, count: int, attempt: int | None) -> int:
    """Return the number of an attempt, from 1. Raises ``NoAttemptError`` unless it is one of ``count``."""
    number = count if attempt is None else attempt if attempt > 0 else count + 1 + attempt
    if not 1 <= number <= count:
        count_text = "there is one" if count == 1 else f"there are {count}"
        raise NoAttemptError(
            f"job {job} has no attempt {attempt}: {count_text}", hint="omit --attempt for the last one"
        )
    return number


def _missing(job: str, every: pl.DataFrame, config: Config) -> AffinodeError:
    waiting = every.filter(pl.col("start").is_null())
    if waiting.is_empty():
        return NoAttemptError(
            f"no attempt of job {job} is stored",
            hint="check the ID, and whether accounting was ingested since (slurm-affinode ingest sacct)",
        )
    row = waiting.row(-1, named=True)
    if row["end"] is not None:
        when = named(row["end"], site_zone(config.cluster.timezone))
        return NoAttemptError(f"job {job} never started: {row['state']} at {when}")
    why = f" ({visible(row['reason'])})" if row["reason"] else ""
    return NoAttemptError(f"job {job} had not started when accounting was ingested: {row['state']}{why}")


def summaries(
    config: Config,
    store: Repository,
    samples: SampleStore,
    attempts: pl.DataFrame,
    now: datetime,
    *,
    nodes: Sequence[Node] = (),
    source: str = "database",
) -> list[JobSummary]:
    """Summarize ``attempts`` (``JOBS``, started), in their order.

    ``nodes``: Slurm's nodes, for the rules about shares of a node; empty: unknown.
    """
    if attempts.is_empty():
        return []
    query, notes = find.interval(config, Request(), samples, now)
    query = stored_accounting.with_known(replace(query, thresholds=report.thresholds(config)), store, now)
    rows = attempts.rows(named=True)
    ends = [_end(row, query) for row in rows]
    begin, finish = min(row["start"] for row in rows), max(ends)
    late = job_runs.caution(replace(query, until=now), attempts, now)
    query = replace(query, since=begin, until=finish)
    jobs = store.jobs(begin, finish, columns=COLUMNS)
    recorded = store.allocation_gpus(begin, finish)
    file = find.site_signatures(config)
    held_gpus = find.hold(query, jobs, recorded, samples, file.signatures, now, attempts)
    all_steps = store.steps_of(sorted(set(attempts["job_id"].to_list())))
    work = _Work(
        config, held_gpus, gpu_tracks.follow(held_gpus, samples),
        _by_key([*squatters.find(held_gpus, file.signatures), *_misfits(config, held_gpus, nodes)]),
        all_steps.partition_by("job_id", as_dict=True),
        _by_job(store.suspensions(begin, now)),
        {tuple(key): number for number, *key in held_gpus.runs.select("run", *JOB_KEY).iter_rows()},
        now, source,
    )  # fmt: skip
    # A job that has ended is not affected by old data.
    return [work.summary(row, end, () if row["end"] else (*notes, *([late] if late else ())))
            for row, end in zip(rows, ends, strict=True)]  # fmt: skip


def _end(row: Mapping[str, Any], query: WasteQuery) -> datetime:
    start: datetime = row["start"]
    end: datetime = row["end"] or query.end_of(row["cluster"])
    return max(end, start + timedelta(seconds=1))


def _misfits(config: Config, held_gpus: HeldGpus, nodes: Sequence[Node]) -> list[Finding]:
    # The minimum hours are of all jobs of a user, for mails; the owner asks about one job.
    rules = replace(config.zombies.misfits, min_gpu_hours=0.0, min_core_hours=0.0)
    classes = {**config.zombies.nodes, **find.node_classes(nodes)}
    return misfits.find(held_gpus, rules, classes, min_run_s=parse_span_s(rules.min_run), kinds=_KINDS,
                        gpu_partitions=find.gpu_partitions(nodes), rules=misfits.OWNER_RULES)  # fmt: skip


Key = tuple[Any, ...]
"""``JOB_KEY``."""


def _by_key(findings: Iterable[Finding]) -> dict[Key, list[Finding]]:
    findings_by_attempt: dict[Key, list[Finding]] = {}
    for finding in findings:
        if finding.job is not None:
            findings_by_attempt.setdefault((finding.cluster, finding.job.job_id, finding.job.submit), []).append(
                finding
            )
    return findings_by_attempt


def _by_job(entries: Iterable[LedgerEntry]) -> dict[tuple[str, int], list[LedgerEntry]]:
    entries_by_job: dict[tuple[str, int], list[LedgerEntry]] = {}
    for entry in entries:
        entries_by_job.setdefault((entry.cluster, entry.job_id), []).append(entry)
    return entries_by_job


@dataclass(frozen=True, slots=True)
class _Work:
    """The data of all attempts that are summarized together."""

    config: Config
    held_gpus: HeldGpus
    tracks: list[GpuTrack]
    findings: Mapping[Key, list[Finding]]
    steps: Mapping[tuple[Any, ...], pl.DataFrame]
    ledger: Mapping[tuple[str, int], list[LedgerEntry]]
    runs: Mapping[Key, int]
    now: datetime
    source: str

    def summary(self, row: dict[str, Any], end: datetime, notes: Sequence[str]) -> JobSummary:
        """Summarize the attempt of a row of ``JOBS``."""
        key = tuple(row[name] for name in JOB_KEY)
        ref, facts = squatters.run_ref(row, end), squatters.run_facts(row, end)
        gpus, tracks, slack_ms = self._gpus(row, self.runs.get(key))
        asleep = self._suspensions(row)
        findings = self.findings.get(key, [])
        used = job_use.uses(row, facts, self._steps(key), gpus)
        site = self._site()
        memory = row["alloc_mem_bytes"] or row["req_mem_bytes"]
        models = sorted({gpu.model for gpu in gpus if gpu.model} or ({row["gpu_type"]} if row["gpu_type"] else set()))
        return JobSummary(
            job=ref, cluster=row["cluster"], user=row["user"], uid=row["uid"], account=row["account"],
            partition=row["partition"], qos=row["qos"], nodes=_nodes(row["node_list"]), cpus=row["cpus"],
            memory_gib=memory / job_use.GIB if memory else None, gpu_count=row["gpus"], gpu_models=tuple(models),
            until=end, suspended_s=float(row["suspended_s"] or 0), slot_s=_slot_s(tracks), uses=used, gpus=gpus,
            idle_windows=job_use.idle_windows(gpus, tracks, slack_ms), suspensions=asleep,
            findings=tuple(
                JobFinding(finding.kind, finding.variant, round(finding.score, 3), finding.summary)
                for finding in findings
            ),
            verdict=job_use.verdict(row, facts, used, gpus, site),
            advice=job_use.advise(row, facts, gpus, tracks, findings, site, batch=ref.batch, suspended=bool(asleep)),
            notes=(*notes, *_gaps(row, gpus)), source=self.source, generated=self.now,
            admin_comment=admin_comment.recognized(row["admin_comment"]),
        )  # fmt: skip

    def _site(self) -> job_use.SiteSettings:
        rules = self.config.zombies.misfits
        return job_use.SiteSettings(
            rules.user_efficiency_pct, rules.cpu_efficiency_pct, self.config.idle.idle_pct,
            self.config.suspend.shared_store is not None,
        )  # fmt: skip

    def _steps(self, key: Key) -> list[dict[str, Any]]:
        cluster, job_id, submit = key
        steps = self.steps.get((job_id,))
        if steps is None:
            return []
        return steps.filter(pl.col("cluster") == cluster, pl.col("submit") == submit).rows(named=True)

    def _gpus(self, row: dict[str, Any], run: int | None) -> tuple[tuple[GpuUse, ...], list[GpuTrack], int]:
        """Return the GPUs of an attempt in order of node and index, their tracks, and twice their sampling interval."""
        pairs = [] if run is None else _pairs_of_run(self.held_gpus, run)
        uses = []
        for pair in pairs:
            device = self.held_gpus.devices.row(self.held_gpus.pairs["at"][pair], named=True)
            device["name"] = squatters.name_of(device)
            use = job_use.gpu_use(
                self.tracks[pair], device, row["suspended_s"] or 0, self.held_gpus.pairs["mapping"][pair],
                shared=bool(self.held_gpus.shared[pair]),
            )  # fmt: skip
            uses.append((use, self.tracks[pair]))
        uses.sort(key=lambda each: (each[0].node or "", squatters.order(each[0].gpu)))
        slack_ms = 2 * max((int(self.held_gpus.steps_ms[pair]) for pair in pairs), default=0)
        return tuple(use for use, _ in uses), [track for _, track in uses], slack_ms

    def _suspensions(self, row: dict[str, Any]) -> tuple[JobSuspension, ...]:
        entries = self.ledger.get((row["cluster"], row["job_id"]), [])
        own_entries = [entry for entry in entries if entry.began_ms >= row["start"].timestamp() * 1000]
        if not own_entries:
            return ()
        query = WasteQuery(row["start"], self.now)
        frame = suspensions.given_back(own_entries, query, now=self.now).sort("began")
        return tuple(
            JobSuspension(entry["began"], entry["mode"], entry["outcome"], entry["why"], entry["node"],
                          entry["restored_node"], entry["asleep_s"], entry["gpu_hours_given_back"], entry["failure"])
            for entry in frame.iter_rows(named=True)
        )  # fmt: skip


def _pairs_of_run(held_gpus: HeldGpus, run: int) -> list[int]:
    """Return the numbers of the pairs of a run; pairs are sorted by run."""
    column = held_gpus.pairs["run"]
    first, last = column.search_sorted(run, side="left"), column.search_sorted(run, side="right")
    return list(range(int(first), int(last)))


def _nodes(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(hostlist.expand(text)) if text else ()
    except ValueError:
        return (text,) if text else ()


def _slot_s(tracks: Sequence[GpuTrack]) -> float:
    return (tracks[0].end - tracks[0].start) / 1000 / tracks[0].slots if tracks else 0.0


def _gaps(row: Mapping[str, Any], gpus: Sequence[GpuUse]) -> list[str]:
    """Return notes about what is not known of an attempt; the verdict says so if no GPU is known or measured."""
    notes = []
    count = row["gpus"] or 0
    if gpus and len(gpus) < count:
        notes.append(f"{count - len(gpus)} of its {count} GPUs are not known")
    dark = sum(gpu.measured_s <= 0 for gpu in gpus)
    if 0 < dark < len(gpus):
        notes.append(f"{dark} of its {len(gpus)} GPUs {'was' if dark == 1 else 'were'} not measured")
    if any(gpu.shared for gpu in gpus):
        notes.append("GPUs are shared: their activity is that of all jobs on them")
    if row["suspended_s"]:
        long = span(row["suspended_s"])
        notes.append(f"Slurm had suspended the job for {long}; when is not recorded, so as much idle time is unknown")
    return notes


def summarize_live(
    config: Config, job: str, sampler: NodeSampler, *, slurm: Slurm, history: History | None = None
) -> JobSummary:
    """Summarize the running attempt of ``job`` from slurmctld, its nodes, and the samples of ``history``, if any.

    This needs no database, so owners may do it. Raises ``NoAttemptError`` if slurmctld knows no such job that runs.
    """
    number = explain.parse(job).job_id

    def running(jobs: Sequence[Job]) -> list[Job]:
        return [candidate for candidate in jobs if candidate.state == "RUNNING"
                and number in (candidate.job_id, candidate.array_job_id, candidate.het_job_id)]  # fmt: skip

    with (
        live.observe(config, Request(kinds=("idle-allocation",)), sampler, slurm=slurm, history=history, only=running)
        as now,
        explain.temporary_store(config, now.snapshot, now.time) as temporary_config,
    ):  # fmt: skip
        summary = summarize(
            temporary_config, job, history=lambda: contextlib.nullcontext(now.history), now=now.time,
            slurm=lambda: contextlib.nullcontext(explain.SnapshotNodes(now.snapshot)),  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        gpus = now.samples.by_job.get(summary.job.job_id, ())
    summary = replace(summary, source="live")
    if not gpus or any(gpu.measured_s > 0 for gpu in summary.gpus):
        return summary
    ran_s = (summary.until - (summary.job.start or summary.until)).total_seconds()
    active = [max(gpu.signals_pct.values()) for gpu in gpus if gpu.signals_pct]
    busy = sum(pct > config.idle.low_pct for pct in active)
    verdict = f"Only the present is known: {busy} of {counted(len(gpus), 'GPU')} {'is' if busy == 1 else 'are'} busy."
    note = f"to watch the GPUs for a while: slurm-affinode zombies explain {summary.job.id} --live --watch 1h"
    return replace(
        summary, gpus=tuple(_present_only(gpu, ran_s) for gpu in gpus), slot_s=ran_s / gpu_tracks.SLOTS,
        verdict=verdict if active else summary.verdict, notes=(note,),
    )  # fmt: skip


def summarize_accounting(
    config: Config,
    job: str,
    *,
    cluster: str | None = None,
    attempt: int | None = None,
    slurm: Slurm | None = None,
    run: Runner = process.run,
    now: datetime | None = None,
) -> JobSummary | None:
    """Summarize an attempt of ``job`` from Slurm's accounting alone, as far as Slurm shows it to the present user.

    Its GPUs are known from the agent's line in AdminComment only. ``None``: accounting does not have the job. Raises
    ``UnreachableError``, ``InputError`` for unreadable accounting, and errors like ``summarize``.
    """
    moment = now or datetime.now(UTC)
    explain.parse(job)
    text = sacct_command.run_sacct_of(job, cluster=cluster, run=run)
    reading = SacctReading(cluster=config.cluster.name_or_default, delimiter=sacct_command.DELIMITER)
    accounting = sacct.read(text, where=f"sacct --jobs={job}", reading=reading)
    if accounting.jobs.is_empty():
        return None
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        url = f"sqlite:///{Path(directory) / 'accounting.sqlite'}"
        with Repository.open(url) as store:
            store.upsert(accounting.jobs, accounting.steps)
            stored_accounting.reached(store, moment, accounting.jobs["cluster"].unique())
        temporary_config = replace(config, store=replace(config.store, db=url))
        no_samples = functools.partial(SampleStore, Path(directory) / "samples")
        summary = summarize(
            temporary_config, job, cluster=cluster, attempt=attempt, slurm=slurm, now=moment,
            history=lambda: contextlib.closing(no_samples()),
        )  # fmt: skip
    verdict = summary.verdict if summary.gpu_count == 0 else "Unknown: the site's GPU metrics were not read."
    return replace(summary, source="accounting", verdict=verdict)


def _present_only(gpu: LiveGpu, ran_s: float) -> GpuUse:
    """Return a GPU of which only the present is known: the last slot."""
    evidence = gpu.evidence()
    return GpuUse(
        node=gpu.node, gpu=evidence.gpu, uuid=gpu.uuid, model=gpu.model, mapping=gpu.mapping, shared=evidence.shared,
        busy_s=0.0, low_s=0.0, idle_s=0.0, unknown_s=ran_s, utilization_pct=None, memory_peak_gib=evidence.held_gib,
        memory_total_gib=evidence.total_gib, longest_idle_s=None,
        activity_pct=(*(None,) * (gpu_tracks.SLOTS - 1), evidence.activity_pct),
    )  # fmt: skip


_LONGEST = timedelta(days=60)
"""Attempts that run longer are not published: accounting has lost most of them, and all their samples would be read."""
_PUBLISHED = "jobs.published"
"""Key: until when attempts were published, and the directory."""


def publish(config: Config, store: Repository, samples: SampleStore, now: datetime, say: Callable[[str], None]) -> int:
    """Publish the attempts that ended since the last publication, or run, to ``nightly.jobs.directory``.

    Attempts of the time before are summarized again, as far as accounting may have been late. Returns the number of
    users with a file. Raises ``AffinodeError``.
    """
    settings = config.nightly.jobs
    assert settings.directory is not None  # noqa: S101 - the caller checks it
    keep_since = now - timedelta(seconds=parse_span_s(settings.keep))
    since = max(keep_since, _published_until(store, settings.directory) - timedelta(
        seconds=parse_span_s(config.nightly.sacct_overlap)))  # fmt: skip
    rows = store.jobs(since, now).filter(pl.col("start").is_not_null(), pl.col("start") > now - _LONGEST)
    nodes, _ = find.slurm_nodes(functools.partial(open_client, config.slurm.backend))  # type: ignore[arg-type]
    job_summaries: list[JobSummary] = []
    days = rows.with_columns(pl.col("end").dt.date().alias("day"))
    # By day of the end, so that the attempts of a chunk, and their samples, are of about the same time.
    for chunk in days.sort("end", nulls_last=True).partition_by("day", maintain_order=True, include_key=False):
        job_summaries += summaries(config, store, samples, chunk, now, nodes=nodes, source="published")
    published = job_files.publish(settings.directory, config.job_summaries_dir, job_summaries, keep_since)
    store.set(_PUBLISHED, json.dumps([utc(now), str(settings.directory)]))
    say(f"  {counted(published.jobs, 'job')} of {counted(published.users, 'user')} in {settings.directory}")
    if published.skipped:
        say(
            f"  {counted(published.skipped, 'user')} skipped: "
            "unknown on this machine, or with another UID in accounting"
        )
    return published.users


def _published_until(store: Repository, directory: Path) -> datetime:
    """Return the time of the last publication into a directory; the epoch: there was none."""
    last_publication = json.loads(store.get(_PUBLISHED) or "null")
    if last_publication is None or last_publication[1] != str(directory):
        return datetime.fromtimestamp(0, UTC)
    return datetime.fromisoformat(last_publication[0])
