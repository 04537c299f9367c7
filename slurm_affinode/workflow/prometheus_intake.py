"""GPU history from a Prometheus server: what is new since the last time, or what is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from slurm_affinode.config import Config, PrometheusConfig
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history.promclient import Client
from slurm_affinode.history.prometheus import Question, discover
from slurm_affinode.history.promingest import Outcome, ingest
from slurm_affinode.history.promql import parse_matchers
from slurm_affinode.history.promserver import Server
from slurm_affinode.history.reading import ReadOptions
from slurm_affinode.history.store import SampleStore
from slurm_affinode.store.repository import Repository
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow.gpu_intake import journal_entry

FIRST_SPAN = timedelta(days=7)
"""How far back is read the first time."""
MARGIN = timedelta(minutes=10)
"""How much more than the time of a report is read for it: how long a sample counts is told by its neighbours."""
_RECENT = timedelta(minutes=15)
_REACHED = "prometheus.until."


@dataclass(frozen=True, slots=True)
class Present:
    """What a server has of the last minutes."""

    url: str
    names: tuple[str, ...]
    """Metrics that can be used."""


def question(settings: PrometheusConfig, since: datetime, until: datetime) -> Question:
    """What is asked of the server. Raises ``AffinodeError`` for matchers, steps and intervals that are none."""
    if until <= since:
        raise AffinodeError(
            f"the interval ends ({until:%Y-%m-%dT%H:%M:%SZ}) before it begins ({since:%Y-%m-%dT%H:%M:%SZ})",
            hint="choose --since before --until",
        )
    step_ms = None if settings.step is None else round(parse_span_s(settings.step) * 1000)
    if step_ms is not None and step_ms < 100:
        raise AffinodeError(f"a step of {settings.step} is too short", hint="write for example --step 30s")
    return Question(_epoch_ms(since), _epoch_ms(until), parse_matchers(settings.match), step_ms)


def take_in(
    config: Config,
    repository: Repository | None,
    since: datetime,
    until: datetime,
    options: ReadOptions,
    *,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda milliseconds: None,
    client: Client | None = None,
) -> Outcome:
    """Take the server's history into that of ``config``; with a ``repository``, note it in its journal.

    Raises ``AffinodeError`` where nothing could be read; a failure after that is part of the outcome.
    """
    asked = question(config.prometheus, since, until)
    server = client or Client(Server.of(config.prometheus))
    history = SampleStore(config.history_dir)
    with closing(history):
        outcome = ingest(history, server, asked, options, dry_run=dry_run, advance=advance)
    if repository is not None and not dry_run:
        for file in outcome.summary.files:
            repository.record_ingest(journal_entry(file, datetime.now(UTC)))
        _remember(repository, config.prometheus, options, since, min(outcome.until, datetime.now(UTC)))
    return outcome


def next_since(
    repository: Repository | None, settings: PrometheusConfig, options: ReadOptions, now: datetime
) -> datetime:
    """Where to go on: a little before the end of the last reading of the same series, else seven days ago."""
    reached = None if repository is None else repository.get(_key(settings, options))
    if reached is None:
        return now - FIRST_SPAN
    overlap = timedelta(seconds=parse_span_s(settings.overlap))
    return min(datetime.fromisoformat(reached), now) - overlap


def _remember(
    repository: Repository, settings: PrometheusConfig, options: ReadOptions, since: datetime, until: datetime
) -> None:
    key = _key(settings, options)
    before = repository.get(key)
    # A reading that leaves a gap behind the last one does not move its end.
    if before is None or since <= datetime.fromisoformat(before) < until:
        repository.set(key, until.astimezone(UTC).isoformat())


def _key(settings: PrometheusConfig, options: ReadOptions) -> str:
    content = json.dumps(
        [settings.url, settings.match, settings.step, options.cluster, sorted(settings.headers.items())]
    )
    return _REACHED + hashlib.sha256(content.encode()).hexdigest()[:16]


@contextmanager
def borrowed(
    settings: PrometheusConfig,
    since: datetime,
    until: datetime,
    options: ReadOptions,
    *,
    advance: Callable[[int], None] = lambda milliseconds: None,
    warned: Callable[[str], None] = lambda text: None,
    client: Client | None = None,
) -> Iterator[SampleStore]:
    """The server's history for one report, in a directory that is gone afterwards; ``warned`` hears of its warnings.

    Raises ``AffinodeError`` also where only a part could be read: a report would take the rest for unknown time.
    """
    asked = question(settings, since - MARGIN, until + MARGIN)
    server = client or Client(Server.of(settings))
    with (
        TemporaryDirectory(prefix="slurm-affinode-") as directory,
        closing(SampleStore(Path(directory) / "history")) as history,
    ):
        outcome = ingest(history, server, asked, options, advance=advance)
        if outcome.failure is not None:
            raise outcome.failure
        for file in outcome.summary.files:
            for what, count in file.decisions:
                warned(f"{file.path}: {count:,} {what}")
        yield history


def look(settings: PrometheusConfig, options: ReadOptions, now: datetime, client: Client | None = None) -> Present:
    """Whether the server answers and has metrics of GPUs. Raises ``AffinodeError``."""
    server = client or Client(Server.of(settings), attempts=2)
    server.instant("vector(1)", _epoch_ms(now))
    return Present(server.server.url, discover(server, question(settings, now - _RECENT, now), options).names)


def _epoch_ms(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
