"""``slurm-affinode ingest``: ingest accounting, GPU metrics, allocations and suspensions."""

from __future__ import annotations

import functools
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_affinode.base.config import UNNAMED_CLUSTER, Config
from slurm_affinode.base.errors import AffinodeError, ConfigError, InputError
from slurm_affinode.base.text import counted
from slurm_affinode.base.times import parse_span_s, utc
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import (
    Span,
    When,
    clock,
    config_options,
    echo,
    json_option,
    print_json,
    print_table,
    progress,
    prometheus_options,
    warn,
    zone,
)
from slurm_affinode.db.records import Counts, IngestProblem, IngestRecord, Upserted
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines import reader as serving
from slurm_affinode.engines.ingest import EngineTotals
from slurm_affinode.metrics.ingest import FileOutcome, IngestSummary
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.importer import ImportOutcome
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.metrics.readers.inputs import FORMATS
from slurm_affinode.pipeline import ingest, ledgers, stored_accounting
from slurm_affinode.pipeline.ledgers import LedgerIntake
from slurm_affinode.slurm import times
from slurm_affinode.slurm.accounting import allocations, sacct, sacct_command
from slurm_affinode.slurm.accounting.allocations import RecordedAllocations
from slurm_affinode.slurm.accounting.sacct import SacctReading
from slurm_affinode.slurm.accounting.schema import Accounting

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class IngestRun:
    """The options of all ``ingest`` commands."""

    config: Config
    dry_run: bool
    shown: int
    """Problems printed for each input."""
    as_json: bool

    def store(self) -> AbstractContextManager[Repository | None]:
        """Open the configured database, and create it if necessary; ``None`` in a dry run."""
        return nullcontext() if self.dry_run else Repository.open(self.config.db_url)

    def zone(self, timezone: str | None) -> str:
        """Return the zone of times without an offset: ``--timezone``, else the configured or local one."""
        return times.zone_name(timezone or self.config.cluster.timezone)

    def warn_of_problems(self, source: str, lines: Iterable[str], count: int) -> None:
        """Print the first problems of an input, and the number of the ``count`` that are omitted."""
        for line in islice(lines, self.shown):
            warn(line)
            count -= 1
        if count > 0:
            warn(f"{source}: {count:,} more problems (--problems N prints more)")

    def say_dry(self) -> None:
        """Print that nothing was stored, in a dry run."""
        if self.dry_run:
            echo("dry run: nothing was stored")


def ingest_options(*own: Option, connection: Sequence[Option] = ()) -> Callable[[F], F]:
    """Add the options of all ``ingest`` commands; the command receives them in ``run: IngestRun``.

    ``own``: options that are listed before ``--json``; ``connection``: options that are added below ``config_options``.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*, config: Config, dry_run: bool, shown: int, as_json: bool, **kwargs: Any) -> Any:
            return function(run=IngestRun(config, dry_run, shown, as_json), **kwargs)

        decorated: Callable[..., Any] = wrapper
        for option in reversed((*_SHARED, *own, json_option, config_options, *connection)):
            decorated = option(decorated)
        return decorated  # type: ignore[return-value]

    return decorate


_SHARED: tuple[Option, ...] = (
    click.option("--dry-run", is_flag=True, help="Read and report, store nothing"),
    click.option(
        "--problems", "shown", type=click.IntRange(0), default=10, show_default=True, metavar="N",
        help="Print at most N problems per input",
    ),
)  # fmt: skip


_AGAIN = click.option("--again", is_flag=True, help="Also read files that were ingested before and are unchanged")
_PROMETHEUS_PERIOD: tuple[Option, ...] = (
    click.option(
        "--since", type=When(), metavar="TIME",
        help="Query Prometheus from TIME, such as 7d (ago) [default: end of the last ingest, else 7d]",
    ),
    click.option("--until", type=When(), default="now", metavar="TIME", help="Query Prometheus until before TIME"),
)  # fmt: skip


def _cluster(text: str) -> Option:
    return click.option("--cluster", metavar="NAME", help=text)


def _timezone(which: str) -> Option:
    return click.option(
        "--timezone", metavar="ZONE", help=f"Set the IANA zone of times {which} [default: configuration, local]"
    )


def _strict(unit: str) -> Option:
    return click.option("--strict", is_flag=True, help=f"Reject {unit}")


_ALLOCATIONS_EPILOG = """\b
Formats, detected by content:
  CSV         job_id,node,gpu[,start,cluster]
              1639021,gpu-2,GPU-5a1f...;GPU-77c0...,2025-05-02T14:09:52+02:00
  JSON lines  {"job_id": 1639021, "node": "gpu-2", "gpu": ["00000000:E1:00.0"]}
  scontrol    the text of: scontrol show job --details

\b
A GPU is a UUID, a PCI address, or an index on its node. Examples:
  slurm-affinode ingest allocations prolog.csv
  scontrol show job -d | slurm-affinode ingest allocations -
"""


@command(epilog=_ALLOCATIONS_EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE|-...", type=click.Path(path_type=Path, allow_dash=True))
@_cluster("Assign records without a cluster to NAME [default: configuration]")
@_timezone("without an offset")
@_strict("an input at its first bad record")
@ingest_options()
def ingest_allocations(
    *,
    files: tuple[Path, ...],
    cluster: str | None,
    timezone: str | None,
    strict: bool,
    run: IngestRun,
) -> int:
    """Ingest the GPUs of jobs, for GPU metrics without job labels.

    Ingesting the same input twice is a no-op. Job IDs are raw IDs (SLURM_JOB_ID), also for array tasks.
    """
    zone = run.zone(timezone)
    results: list[tuple[str, RecordedAllocations, Counts | None]] = []
    with run.store() as repository:
        known = () if repository is None else repository.counts().clusters
        name = cluster or run.config.cluster.name or (known[0] if len(known) == 1 else UNNAMED_CLUSTER)
        for path in files:
            started = datetime.now(UTC)
            data = _content(path)
            found = allocations.read(data, where=str(path), cluster=name, zone=zone, strict=strict)
            if name == UNNAMED_CLUSTER and len(known) > 1 and name in found.gpus["cluster"]:
                raise InputError(
                    f"its records name no cluster, and accounting has {len(known)}: {', '.join(known)}",
                    where=str(path),
                    hint="give --cluster NAME, or set cluster.name in the configuration",
                )
            counts = None if repository is None else _store_allocations(repository, str(path), data, found, started)
            results.append((str(path), found, counts))
    _report_allocations(results, run)
    return 0


def _content(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError("no such file", where=str(path)) from None
    except IsADirectoryError:
        raise InputError("this is a directory", where=str(path), hint="give a file") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _store_allocations(
    repository: Repository, source: str, data: bytes, found: RecordedAllocations, started: datetime
) -> Counts:
    counts = repository.upsert_allocation_gpus(found.gpus)
    repository.record_ingest(
        IngestRecord(
            kind="allocations",
            source=source,
            started=started,
            finished=datetime.now(UTC),
            records=found.records - len(found.problems),
            new=counts.new,
            updated=counts.updated,
            unchanged=counts.unchanged,
            bad=len(found.problems),
            problems=tuple(IngestProblem(str(problem), problem.line) for problem in found.problems),
            notes=found.notes,
            fingerprint=hashlib.sha256(data).hexdigest(),
        )
    )
    return counts


def _report_allocations(results: list[tuple[str, RecordedAllocations, Counts | None]], run: IngestRun) -> None:
    columns = ("source", "records", "jobs", "gpus", "new", "unchanged", "bad records")
    rows = [
        (
            source,
            found.records,
            found.gpus.select("cluster", "job_id").n_unique(),
            found.gpus.height,
            counts.new if counts is not None else None,
            counts.unchanged if counts is not None else None,
            len(found.problems),
        )
        for source, found, counts in results
    ]
    if run.as_json:
        keys = [name.replace(" ", "_") for name in columns]
        sources = [
            {
                **dict(zip(keys, row, strict=True)),
                "problems": [{"line": p.line, "job": p.job, "reason": p.reason} for p in found.problems],
                "notes": list(found.notes),
            }
            for row, (_, found, _) in zip(rows, results, strict=True)
        ]
        print_json({"dry_run": run.dry_run, "sources": sources})
        return
    for source, found, _ in results:
        lines = (f"{source}:{problem.line}: {problem}" for problem in found.problems)
        run.warn_of_problems(source, lines, len(found.problems))
        for note in found.notes:
            warn(f"{source}: {note}")
    cells = [["-" if value is None else value if index == 0 else f"{value:,}" for index, value in enumerate(row)]
             for row in rows]  # fmt: skip
    print_table(columns, cells, right=columns[1:])
    run.say_dry()


_GPU_EPILOG = """\b
Examples:
  slurm-affinode ingest gpu history/                        everything below a directory
  slurm-affinode ingest gpu '/var/log/gpu/*/2026-11-*.csv.gz'
  slurm-affinode ingest gpu --cluster alpha metrics.prom    exposition text of dcgm-exporter, federated or saved
  slurm-affinode ingest gpu range.json                      a response of Prometheus' /api/v1/query_range
  slurm-affinode ingest gpu --node gpu01 --start 2026-11-01T08:00 --interval 30s dmon.txt
  slurm-affinode ingest gpu --timezone Europe/Oslo gpu01/nvidia-smi.csv
  ssh gpu01 'date -Is; nvidia-smi' | slurm-affinode ingest gpu --node gpu01 -
  curl -s http://gpu01:9400/metrics | slurm-affinode ingest gpu --start now -
  slurm-affinode ingest gpu --prometheus http://prometheus:9090 --since 7d --match 'cluster="alpha"'
  slurm-affinode ingest gpu --prometheus https://metrics.example.org --token-file token --ca-file ca.pem

\b
Formats:
  prometheus        exposition text with timestamps, mostly ms (many scrapes in a file are fine)
  openmetrics       likewise with '# EOF' at the end, timestamps mostly in seconds
  prometheus-json   responses of the Prometheus API, query_range or query
  csv               with a header; name unknown columns in gpu_history.columns of the configuration
  nvidia-smi        nvidia-smi --query-gpu=... --format=csv; without a header give --fields
  nvidia-smi-table  the table of nvidia-smi, once or many times, with lines of date
  nvidia-smi-q      nvidia-smi -q, once or many times
  nvidia-smi-xml    nvidia-smi -q -x, once or many times
  dmon              dcgmi dmon; needs --start and --interval
  parquet           columns as in csv
Compressed text (gzip, zstd, bzip2, xz) is read as it is.
"""


@command(epilog=_GPU_EPILOG)
@click.argument("paths", nargs=-1, type=click.Path(readable=False), metavar="[PATH...]")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    metavar="FORMAT",
    help="Set the format of every file, one of those below [default: by content]",
)
@_cluster("Set the cluster of every sample [default: from the file, else configuration]")
@click.option("--node", metavar="NAME", help="Set the node of samples without one [default: file or directory name]")
@_timezone("without one")
@click.option("--start", metavar="TIME", help="Set the time of the first sample in files without times")
@click.option(
    "--interval", type=Span(), metavar="SPAN", help="Set the sampling interval in files without times, such as 30s"
)
@click.option("--fields", metavar="LIST", help="Set the columns of a table without a header (list of --query-gpu)")
@_strict("a file at its first bad line")
@_AGAIN
@ingest_options(*_PROMETHEUS_PERIOD, connection=(prometheus_options,))
def ingest_gpu(
    *,
    paths: tuple[str, ...],
    format_: str | None,
    cluster: str | None,
    node: str | None,
    timezone: str | None,
    start: str | None,
    interval: float | None,
    fields: str | None,
    strict: bool,
    again: bool,
    since: datetime | None,
    until: datetime,
    with_prometheus: bool,
    run: IngestRun,
) -> int:
    """Ingest GPU metrics from files, directories, globs, standard input (-) or a Prometheus server.

    Ingesting the same input twice is a no-op; files may overlap and come in any order. An unusable file is reported
    in one line and not stored; the others are ingested, and the exit status is 2. Exit status 3: Prometheus does
    not respond or failed midway; everything read before is stored.
    """
    if paths and (with_prometheus or since is not None):
        raise click.UsageError("files and Prometheus are read one after the other: give PATH... or --prometheus URL")
    if not paths and run.config.prometheus.url is None:
        raise click.UsageError("nothing to read: give PATH... or --prometheus URL")
    if not paths:
        of_files = {"--format": format_, "--timezone": timezone, "--start": start, "--interval": interval,
                    "--fields": fields, "--again": again}  # fmt: skip
        for name, value in of_files.items():
            if value:
                raise click.UsageError(f"{name} is for files, not for Prometheus")
    options = ingest.read_options(
        run.config, cluster=cluster, node=node, zone=timezone, start=start, interval_s=interval,
        fields=[name for name in (fields or "").split(",") if name.strip()], strict=strict,
    )  # fmt: skip
    if not paths:
        return _from_prometheus(run, options, since, until)
    with run.store() as repository, _with_stdin(paths) as given:
        total = sum(inputs.size(path) for path in inputs.expand(given)[0])
        with progress("reading", total=total, quiet=run.as_json, of_bytes=True) as advance:
            summary = ingest.ingest_gpu_samples(
                run.config, repository, given, options, format=format_, again=again, dry_run=run.dry_run,
                advance=advance,
            )  # fmt: skip
    _report_gpu(summary, run)
    return 2 if summary.failed else 0


def _from_prometheus(run: IngestRun, options: ReadOptions, since: datetime | None, until: datetime) -> int:
    server = _server(run)
    with run.store() as repository:
        begin = since or ingest.next_since(repository, run.config.prometheus, options, datetime.now(UTC))
        with _progress_of_time(run, begin, until) as advance:
            outcome = ingest.ingest_prometheus(
                run.config, repository, begin, until, options, dry_run=run.dry_run, advance=advance,
                client=Client(server),
            )  # fmt: skip
    _report_gpu(outcome.summary, run, failure=outcome.failure)
    return _continued(outcome)


def _server(run: IngestRun) -> Server:
    server = Server.of(run.config.prometheus)
    if server.exposed:
        warn(f"{server.url}: the credentials go over the network as plain text; https would keep them")
    return server


def _progress_of_time(
    run: IngestRun, begin: datetime, until: datetime
) -> AbstractContextManager[Callable[[int], None]]:
    whole = round((until - begin).total_seconds() * 1000)
    return progress("reading", total=max(0, whole), quiet=run.as_json, of_time=True)


def _continued(outcome: ImportOutcome) -> int:
    """Print how to continue after a failure; return the exit status."""
    if outcome.failure is None:
        return 0
    warn(f"slurm-affinode: {outcome.failure}")
    warn(f"  samples before {utc(outcome.until)} are ingested; run the same command again to continue")
    return outcome.failure.exit_code


@contextmanager
def _with_stdin(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield ``paths`` with ``-`` replaced by a file with the contents of standard input."""
    if "-" not in paths:
        yield list(paths)
        return
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        # A neutral directory name: that of the temporary directory would be used as the node name.
        held = Path(directory) / "stdin" / "stdin"
        held.parent.mkdir()
        with held.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield [str(held) if path == "-" else path for path in paths]


def _report_gpu(summary: IngestSummary, run: IngestRun, *, failure: AffinodeError | None = None) -> None:
    if run.as_json:
        print_json({**_gpu_as_json(summary), "error": None if failure is None else str(failure)})
        return
    for one in summary.files:
        _print_gpu_problems(one, run)
    if summary.first is not None:
        for name, text in _rows(summary):
            echo(f"{name:<11} {text}")
    elif not summary.failed:
        _say_unchanged(summary)
    run.say_dry()


def _say_unchanged(summary: IngestSummary) -> None:
    count = len(summary.files)
    files = "1 file was ingested before and is" if count == 1 else f"{count:,} files were ingested before and are"
    echo(f"nothing new: {files} unchanged")


def _rows(summary: IngestSummary, *, unit: str = "device") -> list[tuple[str, str]]:
    by_status = {word: sum(one.status == word for one in summary.files) for word in ("taken", "known", "failed")}
    words = {"taken": "read", "known": "known already", "failed": "not usable"}
    sources = "server" if any(one.format == "prometheus-api" for one in summary.files) else "files"
    rows = [
        (sources, ", ".join(f"{by_status[word]:,} {words[word]}" for word in words if by_status[word])),
        ("samples", f"{summary.samples:,}"),
    ]
    if not summary.dry_run:
        rows += [("new", f"{summary.new:,}"), ("duplicates", f"{summary.duplicates:,}")]
    rows += [
        (f"{unit}s", f"{summary.devices:,} on {counted(summary.nodes, 'node')}"),
        ("from", "unknown" if summary.first is None else f"{clock(summary.first, seconds=True)} ({zone()})"),
        ("to", "unknown" if summary.last is None else clock(summary.last, seconds=True)),
    ]
    if summary.steps_s:
        rows.append(("step", ", ".join(f"{step:g} s ({counted(count, unit)})" for step, count in summary.steps_s[:5])))
    if unknown := _unknown(summary):
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        rows.append(("not used", ", ".join(list(unknown)[:10]) + more))
    if summary.problem_count:
        rows.append(("bad lines", f"{summary.problem_count:,}"))
    return rows


def _unknown(summary: IngestSummary) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in summary.files:
        for name, count in one.unknown:
            counts[name] = counts.get(name, 0) + count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _print_gpu_problems(one: FileOutcome, run: IngestRun) -> None:
    if one.error is not None:
        warn(f"slurm-affinode: {one.error}")
        if one.hint:
            warn(f"  {one.hint}")
        return
    lines = (f"{one.path}{'' if p.line is None else f':{p.line}'}: {p.reason}" for p in one.problems)
    run.warn_of_problems(one.path, lines, one.problem_count)
    for what, count in one.decisions:
        warn(f"{one.path}: {count:,} {what}")


def _gpu_as_json(summary: IngestSummary) -> dict[str, Any]:
    return {
        "dry_run": summary.dry_run,
        "samples": summary.samples,
        "new": summary.new,
        "duplicates": summary.duplicates,
        "devices": summary.devices,
        "nodes": summary.nodes,
        "first": summary.first,
        "last": summary.last,
        "steps_s": [{"step_s": step, "devices": count} for step, count in summary.steps_s],
        "bad_lines": summary.problem_count,
        "unknown": _unknown(summary),
        "files": [_file_json(one) for one in summary.files],
    }


def _file_json(one: FileOutcome) -> dict[str, Any]:
    return {
        "path": one.path,
        "status": one.status,
        "format": one.format,
        "samples": one.samples,
        "first": one.first,
        "last": one.last,
        "error": one.error,
        "hint": one.hint,
        "bad_lines": one.problem_count,
        "problems": [{"line": problem.line, "reason": problem.reason} for problem in one.problems],
        "decisions": dict(one.decisions),
        "unknown": dict(one.unknown),
    }


_SERVING_EPILOG = """\b
Examples:
  slurm-affinode ingest serving recordings/                 everything below a directory
  slurm-affinode ingest serving --node gpu01 --address gpu01:8000 vllm.prom.gz
  slurm-affinode ingest serving --scrape http://gpu01:8000/metrics --scrape gpu02:30000
  curl -s http://gpu01:8000/metrics | slurm-affinode ingest serving --start now --address gpu01:8000 -
  slurm-affinode ingest serving --prometheus http://prometheus:9090 --since 7d
  slurm-affinode ingest serving range.json                  a response of Prometheus' /api/v1/query_range

\b
Formats:
  prometheus       exposition text of vLLM, SGLang, TGI, Triton (TensorRT-LLM) and llama.cpp, one or more scrapes;
                   recordings with '# scrape MS took 0.012s' and '# scrape MS failed after 0.000s: WHY' lines
  openmetrics      likewise with '# EOF' at the end
  prometheus-json  responses of the Prometheus API
  parquet          columns of the sample schema (docs/engine-metrics.md)
Compressed text (gzip, zstd, bzip2, xz) is read as it is.
"""


@command(epilog=_SERVING_EPILOG)
@click.argument("paths", nargs=-1, type=click.Path(readable=False), metavar="[PATH...]")
@click.option(
    "--scrape", "urls", multiple=True, metavar="URL", help="Scrape this endpoint once; may be repeated"
)  # fmt: skip
@click.option(
    "--format", "format_", type=click.Choice(serving.FORMATS), help="Set the format of every file [default: by content]"
)
@_cluster("Set the cluster of every sample [default: from the file, else configuration]")
@click.option("--node", metavar="NAME", help="Set the node of every sample [default: from the labels]")
@click.option(
    "--address", metavar="HOST:PORT", help="Set the address of series without one [default: name of the file]"
)
@click.option("--start", metavar="TIME", help="Set the time of the first scrape in files without times")
@click.option(
    "--interval", type=Span(), metavar="SPAN", help="Set the scrape interval in files without times, such as 15s"
)
@_strict("a file at its first bad line")
@_AGAIN
@ingest_options(*_PROMETHEUS_PERIOD, connection=(prometheus_options,))
def ingest_serving(
    *,
    paths: tuple[str, ...],
    urls: tuple[str, ...],
    format_: str | None,
    cluster: str | None,
    node: str | None,
    address: str | None,
    start: str | None,
    interval: float | None,
    strict: bool,
    again: bool,
    since: datetime | None,
    until: datetime,
    with_prometheus: bool,
    run: IngestRun,
) -> int:
    """Ingest metrics of inference engines from files, standard input (-), Prometheus or by a scrape.

    Ingesting the same input twice is a no-op. What an engine does not export is unknown. Of a file that is cut off,
    the lines before are ingested. An unusable file or endpoint is reported in one line; the others are ingested, and
    the exit status is 2. Exit status 3: Prometheus does not respond or failed midway.
    """
    if bool(paths) + bool(urls) + (with_prometheus or since is not None) > 1:
        raise click.UsageError("give PATH..., --scrape URL or --prometheus URL, one after the other")
    if not paths and not urls and run.config.prometheus.url is None:
        raise click.UsageError("nothing to read: give PATH..., --scrape URL or --prometheus URL")
    if not paths and (format_ or address or start or interval or again):
        raise click.UsageError("--format, --address, --start, --interval and --again are for files")
    options = ingest.read_options(
        run.config, cluster=cluster, node=node, start=start, interval_s=interval, strict=strict
    )  # fmt: skip
    if not paths and not urls:
        return _engines_from_prometheus(run, options, since, until)
    with run.store() as repository, _with_stdin(paths) as given:
        total = sum(inputs.size(path) for path in inputs.expand(given)[0])
        with progress("reading", total=total, quiet=run.as_json or bool(urls), of_bytes=True) as advance:
            summary, totals = ingest.ingest_engine_samples(
                run.config, repository, options, paths=given, urls=urls, format=format_, address=address, again=again,
                dry_run=run.dry_run, advance=advance,
            )  # fmt: skip
    _report_serving(summary, totals, run)
    return 2 if summary.failed else 0


def _engines_from_prometheus(run: IngestRun, options: ReadOptions, since: datetime | None, until: datetime) -> int:
    server = _server(run)
    with run.store() as repository:
        now = datetime.now(UTC)
        begin = since or ingest.next_since(repository, run.config.prometheus, options, now, kind="serving")
        with _progress_of_time(run, begin, until) as advance:
            outcome, totals = ingest.ingest_engines_of_prometheus(
                run.config, repository, begin, until, options, dry_run=run.dry_run, advance=advance,
                client=Client(server),
            )  # fmt: skip
    _report_serving(outcome.summary, totals, run, failure=outcome.failure)
    return _continued(outcome)


def _report_serving(
    summary: IngestSummary, totals: EngineTotals, run: IngestRun, *, failure: AffinodeError | None = None
) -> None:  # fmt: skip
    engines = dict(sorted(totals.engines.items()))
    if run.as_json:
        found = _gpu_as_json(summary)
        found["engines"] = found.pop("devices")
        found["steps_s"] = [{"step_s": step, "engines": count} for step, count in summary.steps_s]
        error = None if failure is None else str(failure)
        print_json({**found, "by_engine": engines, "failed_scrapes": totals.failed_scrapes, "error": error})
        return
    for one in summary.files:
        _print_gpu_problems(one, run)
    if summary.first is not None:
        rows = dict(_rows(summary, unit="engine"))
        rows["engines"] = ", ".join(f"{count:,} {engine}" for engine, count in engines.items())
        if totals.failed_scrapes:
            rows["failed"] = counted(totals.failed_scrapes, "scrape")
        rows.pop("not used", None)  # engines export hundreds of metrics that no column needs
        for name, text in rows.items():
            echo(f"{name:<11} {text}")
    elif not summary.failed:
        _say_unchanged(summary)
    run.say_dry()


_SACCT_EPILOG = """\b
Examples:
  slurm-affinode ingest sacct                              query sacct for new records
  slurm-affinode ingest sacct --since 30d                  query sacct for the last 30 days
  slurm-affinode ingest sacct jobs.txt more.txt.gz         files of sacct -P or sacct --json
  sacct -aDP -S now-1day -o ALL | slurm-affinode ingest sacct -
  slurm-affinode ingest sacct --timezone Europe/Oslo jobs.txt
"""


@dataclass(frozen=True, slots=True)
class _Source:
    """An input: its display name, and its content or path for the parser."""

    name: str
    content: Path | bytes


@dataclass(frozen=True, slots=True)
class Intake:
    """The outcome of ingesting one input."""

    source: str
    accounting: Accounting
    stored: Upserted | None
    """``None``: nothing was stored (a dry run)."""


@command(epilog=_SACCT_EPILOG)
@click.argument("files", nargs=-1, metavar="[FILE|-]...", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--since", type=When(), metavar="TIME", help="Query sacct from TIME [default: end of the last run]")
@click.option("--until", type=When(), metavar="TIME", help="Query sacct until TIME [default: now]")
@_cluster("Assign records without a cluster to NAME; without FILE, query this cluster [default: configuration]")
@click.option("--all-clusters", is_flag=True, help="Query every cluster of the accounting database (without FILE)")
@_timezone("without an offset in FILE")
@click.option(
    "--delimiter", metavar="TEXT", help="Set the delimiter of FILE, such as '\\t' or '\\x1f' [default: detected]"
)
@_strict("an input at its first bad record")
@ingest_options()
def ingest_sacct(
    *,
    files: tuple[Path, ...],
    since: datetime | None,
    until: datetime | None,
    cluster: str | None,
    all_clusters: bool,
    timezone: str | None,
    delimiter: str | None,
    strict: bool,
    run: IngestRun,
) -> int:
    """Ingest accounting: output of sacct -P or sacct --json, or run sacct.

    Ingesting the same input twice is a no-op; a job that was running is completed when it is seen again. A bad
    record is reported with its line, and the others are ingested; an unreadable input changes nothing.
    """
    if files and (since or until or all_clusters):
        raise click.UsageError("--since, --until and --all-clusters are for running sacct: leave them out, or FILE")
    if not files and (timezone or delimiter):
        raise click.UsageError("--timezone and --delimiter need FILE")
    how = SacctReading(
        cluster=cluster or run.config.cluster.name_or_default,
        zone=run.zone(timezone) if files else "UTC",
        delimiter=_unescape(delimiter),
        strict=strict,
    )
    done: list[Intake] = []
    failed: list[AffinodeError] = []
    with run.store() as repository:
        if files:
            for source in _sources(files):
                try:
                    done.append(_one(source, how, repository, quiet=run.as_json))
                except InputError as error:
                    failed.append(error)
        else:
            summary = _run_sacct(
                repository, how, since=since, until=until, config=run.config, cluster=cluster, all_clusters=all_clusters
            )
            done.append(summary)
    _report_sacct(done, run)
    if len(failed) == 1:
        raise failed[0]
    for failure in failed:
        warn(f"slurm-affinode: {failure}")
    return 2 if failed else 0


def _sources(files: Sequence[Path]) -> Iterator[_Source]:
    for path in files:
        if str(path) == "-":
            yield _Source("-", sys.stdin.buffer.read())
        else:
            yield _Source(str(path), path)


def _one(source: _Source, how: SacctReading, repository: Repository | None, *, quiet: bool) -> Intake:
    started = datetime.now(UTC)
    if repository is not None:
        how = replace(how, counting=stored_accounting.counting_clusters(repository))
    with progress(f"reading {source.name}", total=None, quiet=quiet) as advance:
        accounting = sacct.read(source.content, where=source.name, how=how, advance=advance)
    accounting = replace(accounting, notes=(*accounting.notes, *_jobstats(accounting)))
    return _store_sacct(source, accounting, repository, started)


def _jobstats(accounting: Accounting) -> tuple[str, ...]:
    """Return a note on jobstats summaries in the input: they are averages, and are not mixed with samples."""
    comments = accounting.jobs["admin_comment"]
    there = int((comments.str.starts_with("JS1:") & ~comments.is_in(["JS1:Short", "JS1:None"])).sum())
    if not there:
        return ()
    what = "1 run has a jobstats summary" if there == 1 else f"{there:,} runs have a jobstats summary"
    return (f"{what} in AdminComment, averages that a report cannot use: see slurm-affinode trace jobstats",)


def _store_sacct(source: _Source, accounting: Accounting, repository: Repository | None, started: datetime) -> Intake:
    if repository is None:
        return Intake(source.name, accounting, None)
    stored = stored_accounting.ingest_accounting(
        repository,
        accounting,
        source=source.name,
        started=started,
        finished=datetime.now(UTC),
        fingerprint=_fingerprint(source.content),
    )
    return Intake(source.name, accounting, stored)


def _run_sacct(
    repository: Repository | None,
    how: SacctReading,
    *,
    since: datetime | None,
    until: datetime | None,
    config: Config,
    cluster: str | None,
    all_clusters: bool,
) -> Intake:
    now = datetime.now(UTC)
    until = until or now
    if since is None:
        overlap = timedelta(seconds=parse_span_s(config.nightly.sacct_overlap))
        since = until - stored_accounting.FIRST_SPAN
        if repository is not None:
            since = stored_accounting.default_since(repository, now=until, overlap=overlap)
    if since >= until:
        raise click.UsageError(f"--since {utc(since)} is not before --until {utc(until)}")
    content = sacct_command.run_sacct(since, until, clusters=(cluster,) if cluster else (), all_clusters=all_clusters)
    name = f"sacct {utc(since)}..{utc(until)}"
    result = _one(_Source(name, content), replace(how, delimiter=sacct_command.DELIMITER), repository, quiet=True)
    if repository is not None:
        answered = set(result.accounting.jobs["cluster"].unique()) | ({cluster} if cluster else set())
        stored_accounting.reached(repository, min(until, now), answered)
    return result


def _unescape(delimiter: str | None) -> str | None:
    if delimiter is None:
        return None
    try:
        text = delimiter.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        text = delimiter
    if not text or "\n" in text:
        raise click.UsageError(f"--delimiter {delimiter!r} cannot separate fields")
    return text


def _fingerprint(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _report_sacct(done: Sequence[Intake], run: IngestRun) -> None:
    if run.as_json:
        print_json({"dry_run": run.dry_run, "sources": [_as_json(one) for one in done]})
        return
    for one in done:
        _print_problems(one, run)
    if not done:
        return
    count = ("records", "job runs", "steps", "new", "updated", "unchanged", "bad records")
    rows = [[one.source, *(f"{value:,}" if value is not None else "-" for value in _figures(one))] for one in done]
    print_table(("source", *count), rows, right=count)
    run.say_dry()


def _figures(one: Intake) -> list[int | None]:
    accounting = one.accounting
    total = one.stored.jobs + one.stored.steps if one.stored is not None else None
    return [
        accounting.records,
        accounting.jobs.height,
        accounting.steps.height,
        *((total.new, total.updated, total.unchanged) if total is not None else (None, None, None)),
        accounting.bad_records,
    ]


def _print_problems(one: Intake, run: IngestRun) -> None:
    accounting = one.accounting
    lines = (f"{_where(one, problem.line)}: {problem}" for problem in accounting.problems)
    run.warn_of_problems(one.source, lines, len(accounting.problems))
    for decision in accounting.decisions[: run.shown]:
        warn(f"{_where(one, decision.line)}: {decision}")
    if (rest := len(accounting.decisions) - run.shown) > 0:
        warn(f"{one.source}: {rest:,} more times were decided in the same way")
    for note in accounting.notes:
        warn(f"{one.source}: {note}")


def _where(one: Intake, line: int | None) -> str:
    if line is None:
        return one.source
    return f"{one.source}:{line}" if one.accounting.unit == "line" else f"{one.source}, {one.accounting.unit} {line}"


def _as_json(one: Intake) -> dict[str, Any]:
    accounting = one.accounting
    names = ("records", "job_runs", "steps", "new", "updated", "unchanged", "bad_records")
    return {
        "source": one.source,
        **dict(zip(names, _figures(one), strict=True)),
        "problems": [
            {accounting.unit: p.line, "job": p.job, "field": p.field, "reason": p.reason, "left_out": p.dropped}
            for p in accounting.problems
        ],
        "times_decided": [
            {
                accounting.unit: d.line, "job": d.job, "field": d.field, "local": d.local.isoformat(),
                "taken_as": d.chosen, "exists": d.exists,
            }
            for d in accounting.decisions
        ],
        "notes": list(accounting.notes),
    }  # fmt: skip


_SUSPENSIONS_EPILOG = """\b
The ledgers are NODE.jsonl in the directory suspend.ledger; report and nightly ingest them by themselves.
Examples:
  slurm-affinode ingest suspensions
  slurm-affinode ingest suspensions /shared/slurm-affinode/ledger
"""


@command(epilog=_SUSPENSIONS_EPILOG)
@click.argument("paths", nargs=-1, metavar="[DIR|FILE]...", type=click.Path(path_type=Path))
@ingest_options()
def ingest_suspensions(*, paths: tuple[Path, ...], run: IngestRun) -> int:
    """Ingest the ledgers of suspended jobs, for the report's section on GPUs given back.

    Ingesting the same input twice is a no-op.
    """
    chosen = paths or ((run.config.ledger_dir,) if run.config.ledger_dir is not None else ())
    if not chosen:
        raise ConfigError("no ledger is named", hint="give its directory, or set [suspend] ledger or shared_store")
    with run.store() as store:
        results = [one for path in chosen for one in ledgers.ingest_ledgers(store, path)]
    _report_suspensions(results, run)
    return 0


def _report_suspensions(results: list[LedgerIntake], run: IngestRun) -> None:
    if run.as_json:
        print_json(
            [
                {
                    "source": one.source,
                    "entries": one.entries,
                    "new": None if one.counts is None else one.counts.new,
                    "updated": None if one.counts is None else one.counts.updated,
                    "unchanged": None if one.counts is None else one.counts.unchanged,
                    "problems": [{"line": problem.line, "reason": problem.reason} for problem in one.problems],
                }
                for one in results
            ]
        )
    elif not results:
        echo("no ledger is there yet")
    else:
        rows = [
            (one.source, one.entries, *(("", "", "") if one.counts is None else _three(one.counts)), len(one.problems))
            for one in results
        ]
        columns = ("ledger", "lines", "new", "updated", "unchanged", "bad")
        print_table(columns, rows, right=columns[1:])
    for one in results:
        lines = (f"{one.source}:{problem.line}: {problem.reason}" for problem in one.problems)
        run.warn_of_problems(one.source, lines, len(one.problems))


def _three(counts: Counts) -> tuple[int, int, int]:
    return counts.new, counts.updated, counts.unchanged
