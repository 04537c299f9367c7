"""Take GPU history into the sample store and note each file in the journal of the relational store.

This is what ``slurm-affinode ingest gpu`` and ``nightly`` do; both only add how it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history import aliases
from slurm_affinode.history.ingest import FileOutcome, IngestSummary, ingest_files
from slurm_affinode.history.localtime import local_zone
from slurm_affinode.history.reading import ReadOptions
from slurm_affinode.history.store import SampleStore
from slurm_affinode.store.records import IngestProblem, IngestRecord
from slurm_affinode.store.repository import Repository
from slurm_affinode.timespec import parse_when


def read_options(
    config: Config,
    *,
    cluster: str | None = None,
    node: str | None = None,
    zone: str | None = None,
    start: str | None = None,
    interval_s: float | None = None,
    fields: Sequence[str] = (),
    strict: bool = False,
) -> ReadOptions:
    """How files are read: what was asked for, else what the configuration says.

    ``start`` is a time as people type it; without a zone of its own it is in ``zone`` like the times of the files.
    Raises ``ConfigError``, and ``AffinodeError`` for a zone or time that is none.
    """
    of_times = _zone(zone or config.cluster.timezone)
    of_start = of_times or local_zone()
    return ReadOptions(
        aliases=aliases.load(config.gpu_history.aliases, config.gpu_history.columns),
        cluster=cluster,
        default_cluster=config.cluster.name_or_default,
        node=node,
        zone=of_times,
        start=parse_when(start, now=datetime.now(UTC), zone=of_start) if start is not None else None,
        interval_s=interval_s,
        fields=tuple(fields),
        strict=strict,
    )


def _zone(name: str | None) -> ZoneInfo | None:
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise AffinodeError(f"{name!r} is no time zone", hint="write for example UTC or Europe/Oslo") from None


def take_in(
    config: Config,
    repository: Repository | None,
    paths: Sequence[str | Path],
    options: ReadOptions,
    *,
    format: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda count: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> IngestSummary:
    """Take ``paths`` into the history of ``config``; with a ``repository``, note the files in its journal.

    A file is noted once its samples are durable; a file that failed is noted with the reason at the end. Files that
    were taken in before and have not changed are not noted again.
    """

    def landed(outcomes: Sequence[FileOutcome]) -> None:
        if repository is not None:
            for outcome in outcomes:
                repository.record_ingest(journal_entry(outcome, now()))

    store = SampleStore(config.history_dir)
    summary = ingest_files(
        store, paths, options, format=format, again=again, dry_run=dry_run, advance=advance, on_landed=landed, now=now
    )  # fmt: skip
    if not dry_run:
        landed(summary.failed)
    return summary


def journal_entry(outcome: FileOutcome, moment: datetime) -> IngestRecord:
    """What the journal says of a file or server; ``moment`` stands in for times that are not known."""
    problems = [IngestProblem(problem.reason, problem.line) for problem in outcome.problems]
    if outcome.error is not None:
        problems.append(IngestProblem(outcome.error))
    notes = [f"{what}: {count:,}" for what, count in outcome.decisions]
    if outcome.unknown:
        notes.append(f"not used: {', '.join(name for name, _ in outcome.unknown[:20])}")
    return IngestRecord(
        kind="gpu",
        source=outcome.path,
        started=outcome.started or moment,
        finished=outcome.finished or moment,
        records=outcome.samples,
        bad=outcome.problem_count + (outcome.error is not None and not outcome.problem_count),
        problems=tuple(problems),
        notes=tuple(notes),
        fingerprint=outcome.fingerprint,
        first=outcome.first,
        last=outcome.last,
    )
