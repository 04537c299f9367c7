"""Where a nightly run takes its data from."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.slurm import commands, sacct
from slurm_affinode.slurm.sacct import Reading
from slurm_affinode.slurm.times import zone_name
from slurm_affinode.store.repository import Repository
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import gpu_intake, intake, prometheus_intake
from slurm_affinode.workflow.nightly.outcome import Failure


@dataclass(frozen=True, slots=True)
class Sources:
    """The two inputs. Each takes in what is new and yields, per input, a line for people or what failed; it raises
    ``AffinodeError`` where it cannot go on."""

    accounting: Callable[[Repository, datetime, datetime], Iterable[str | Failure]]
    """Given the store, the start of the earliest report of a new store, and the present (both UTC)."""
    gpu: Callable[[Repository, datetime], Iterable[str | Failure]]
    """Given the store and the present (UTC)."""


def configured(config: Config) -> Sources:
    """The sources that the configuration names: sacct or files; paths of GPU history and a Prometheus server."""
    paths = config.nightly.accounting_paths

    def accounting(store: Repository, earliest: datetime, now: datetime) -> Iterator[str | Failure]:
        return _files(config, store, paths) if paths else _sacct(config, store, earliest, now)

    return Sources(accounting, lambda store, now: _gpu(config, store, now))


def _sacct(config: Config, store: Repository, earliest: datetime, now: datetime) -> Iterator[str | Failure]:
    overlap = timedelta(seconds=parse_span_s(config.nightly.sacct_overlap))
    since = earliest if store.counts().last is None else intake.default_since(store, now=now, overlap=overlap)
    since = min(since, now - overlap)  # the present may be one of the past: --now
    name = f"sacct {since:%Y-%m-%dT%H:%M:%SZ}..{now:%Y-%m-%dT%H:%M:%SZ}"
    content = commands.run_sacct(since, now)
    text, clusters = _take_in(config, store, content, name, zone="UTC", delimiter=commands.DELIMITER)
    intake.reached(store, now, clusters)
    yield text


def _files(config: Config, store: Repository, patterns: Iterable[str]) -> Iterator[str | Failure]:
    zone = zone_name(config.cluster.timezone)
    known = store.fingerprints("sacct")
    for pattern in patterns:
        try:
            for path in expand(pattern):
                content = _content(path)
                if hashlib.sha256(content).hexdigest() in known:
                    yield f"{path}: unchanged"
                else:
                    yield _take_in(config, store, content, str(path), zone=zone)[0]
        except AffinodeError as error:
            yield Failure("accounting", str(error), error.hint, error.exit_code)


def _take_in(
    config: Config, store: Repository, content: bytes, name: str, *, zone: str, delimiter: str | None = None
) -> tuple[str, frozenset[str]]:
    """What was done, for people, and the clusters that the input is of."""
    started = datetime.now(UTC)
    how = Reading(
        cluster=config.cluster.name_or_default,
        zone=zone,
        delimiter=delimiter,
        counting=intake.counting_clusters(store),
    )
    accounting = sacct.read(content, where=name, how=how)
    counts = intake.take_in(
        store,
        accounting,
        source=name,
        started=started,
        finished=datetime.now(UTC),
        fingerprint=hashlib.sha256(content).hexdigest(),
    ).jobs
    text = (
        f"{name}: {accounting.jobs.height} job runs ({counts.new} new, {counts.updated} updated), "
        f"{accounting.bad_records} bad records"
    )
    return text, frozenset(accounting.jobs["cluster"].unique())


def _gpu(config: Config, store: Repository, now: datetime) -> Iterator[str | Failure]:
    if config.nightly.gpu_paths:
        yield from _gpu_files(config, store)
    if config.prometheus.url is not None:
        yield from _prometheus(config, store, now)


def _prometheus(config: Config, store: Repository, now: datetime) -> Iterator[str | Failure]:
    """What is new; a failure does not keep the files from being read, nor the reports from being made."""
    options = gpu_intake.read_options(config)
    try:
        since = prometheus_intake.next_since(store, config.prometheus, options, now)
        outcome = prometheus_intake.take_in(config, store, since, now, options)
    except AffinodeError as error:
        yield Failure("GPU history", str(error), error.hint, error.exit_code)
        return
    summary = outcome.summary
    yield f"{config.prometheus.url} from {since:%Y-%m-%dT%H:%M:%SZ}: {summary.samples} samples ({summary.new} new)"
    if outcome.failure is not None:
        failure = outcome.failure
        yield Failure("GPU history", str(failure), failure.hint, failure.exit_code)


def _gpu_files(config: Config, store: Repository) -> Iterator[str | Failure]:
    paths = [str(Path(pattern).expanduser()) for pattern in config.nightly.gpu_paths]
    summary = gpu_intake.take_in(config, store, paths, gpu_intake.read_options(config))
    unchanged = sum(file.status == "known" for file in summary.files)
    taken = sum(file.status == "taken" for file in summary.files)
    yield f"{taken} files with {summary.samples} samples ({summary.new} new), {unchanged} files unchanged"
    for file in summary.failed:
        yield Failure("GPU history", file.error or f"{file.path}: failed", file.hint)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error


def expand(pattern: str) -> list[Path]:
    """The paths that ``pattern`` names, in order. Raises ``InputError`` where there are none.

    A pattern that is the name of something is that, whatever brackets the name has.
    """
    path = Path(pattern).expanduser()
    if path.exists():
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - keeps the pattern's own root
    if not found:
        raise InputError("no such file, and no file has a name like that", where=pattern)
    return found
