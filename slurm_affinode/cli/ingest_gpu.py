"""``slurm-affinode ingest gpu``: GPU history from the files that exporters and tools leave, or from Prometheus."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from slurm_affinode.cli.ingest_store import store_unless
from slurm_affinode.cli.options import (
    Span,
    When,
    clock,
    config_options,
    intake_options,
    json_option,
    print_json,
    printable,
    progress,
    warn,
    warn_of_problems,
    zone,
)
from slurm_affinode.cli.prometheus_options import prometheus_options
from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history import inputs
from slurm_affinode.history.detect import FORMATS
from slurm_affinode.history.ingest import FileOutcome, IngestSummary
from slurm_affinode.history.promclient import Client
from slurm_affinode.history.promserver import Server
from slurm_affinode.history.reading import ReadOptions
from slurm_affinode.workflow import gpu_intake, prometheus_intake

_EPILOG = """\b
Examples:
  slurm-affinode ingest gpu history/                        everything below a directory
  slurm-affinode ingest gpu '/var/log/gpu/*/2026-11-*.csv.gz'
  slurm-affinode ingest gpu --cluster alpha metrics.prom    exposition text of dcgm-exporter, federated or saved
  slurm-affinode ingest gpu range.json                      an answer of Prometheus' /api/v1/query_range
  slurm-affinode ingest gpu --node gpu01 --start 2026-11-01T08:00 --interval 30s dmon.txt
  slurm-affinode ingest gpu --timezone Europe/Oslo gpu01/nvidia-smi.csv
  curl -s http://gpu01:9400/metrics | slurm-affinode ingest gpu --start now -
  slurm-affinode ingest gpu --prometheus http://prometheus:9090 --since 7d --match 'cluster="alpha"'
  slurm-affinode ingest gpu --prometheus https://metrics.example.org --token-file token --ca-file ca.pem

\b
Formats:
  prometheus       exposition text with timestamps, mostly ms (many scrapes in a file are fine)
  openmetrics      the same with '# EOF' at the end, timestamps mostly in seconds
  prometheus-json  answers of the Prometheus API, query_range or query
  csv              with a header; name unknown columns in gpu_history.columns of the configuration
  nvidia-smi       nvidia-smi --query-gpu=... --format=csv; without a header give --fields
  dmon             dcgmi dmon; needs --start and --interval
  parquet          columns as in csv
Compressed text (gzip, zstd, bzip2, xz) is read as it is.
"""


@click.command(epilog=_EPILOG)
@click.argument("paths", nargs=-1, type=click.Path(readable=False), metavar="[PATH...]")
@click.option("--format", "format_", type=click.Choice(FORMATS), help="Read every file as this. [default: by content]")
@click.option("--cluster", metavar="NAME", help="Cluster of every sample. [default: the file, else the configuration]")
@click.option("--node", metavar="NAME", help="Node of samples that name none. [default: the file or directory name]")
@click.option("--timezone", metavar="ZONE", help="IANA zone of times without one. [default: configuration, local]")
@click.option("--start", metavar="TIME", help="Time of the first sample, for files without times: 2026-11-01T08:00.")
@click.option("--interval", type=Span(), metavar="SPAN", help="Time between samples, for files without times: 30s.")
@click.option("--fields", metavar="LIST", help="Column names of a table without a header: the list of --query-gpu.")
@click.option("--strict", is_flag=True, help="A bad line rejects its whole file.")
@click.option("--again", is_flag=True, help="Read also files that were taken in before and have not changed.")
@intake_options
@click.option(
    "--since", type=When(), metavar="TIME",
    help="Of Prometheus: from TIME on: 7d (ago), 2026-11-01T08:00. [default: where the last reading ended, else 7d]",
)  # fmt: skip
@click.option("--until", type=When(), default="now", metavar="TIME", help="Of Prometheus: to TIME, not included.")
@json_option
@config_options
@prometheus_options
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
    dry_run: bool,
    shown: int,
    since: datetime | None,
    until: datetime,
    as_json: bool,
    config: Config,
    asked: bool,
) -> int:
    """Take in GPU history: files, directories, globs, - for standard input, or what a Prometheus server has.

    The same input twice changes nothing; overlapping files and files in any order are fine. A file that cannot be
    used is reported in one line, nothing of it is stored, and the others are taken in; the exit status is then 2.
    Exit status 3: Prometheus cannot be reached, or not to the end; what was read until then is stored.
    """
    if paths and (asked or since is not None):
        raise click.UsageError("files and Prometheus are read one after the other: give PATH... or --prometheus URL")
    if not paths and config.prometheus.url is None:
        raise click.UsageError("nothing to read: give PATH... or --prometheus URL")
    if not paths:
        of_files = {"--format": format_, "--timezone": timezone, "--start": start, "--interval": interval,
                    "--fields": fields, "--again": again}  # fmt: skip
        for name, value in of_files.items():
            if value:
                raise click.UsageError(f"{name} is for files, not for Prometheus")
    options = gpu_intake.read_options(
        config, cluster=cluster, node=node, zone=timezone, start=start, interval_s=interval,
        fields=[name for name in (fields or "").split(",") if name.strip()], strict=strict,
    )  # fmt: skip
    if not paths:
        return _from_prometheus(config, options, since, until, dry_run=dry_run, shown=shown, as_json=as_json)
    with store_unless(dry_run, config) as repository, _with_stdin(paths) as given:
        total = sum(inputs.size(path) for path in inputs.expand(given)[0])
        with progress("reading", total=total, quiet=as_json, of_bytes=True) as advance:
            summary = gpu_intake.take_in(
                config, repository, given, options, format=format_, again=again, dry_run=dry_run, advance=advance
            )  # fmt: skip
    _report(summary, shown, as_json=as_json)
    return 2 if summary.failed else 0


def _from_prometheus(
    config: Config, options: ReadOptions, since: datetime | None, until: datetime, *, dry_run: bool, shown: int,
    as_json: bool,
) -> int:  # fmt: skip
    settings = config.prometheus
    server = Server.of(settings)
    if server.exposed:
        warn(f"{server.url}: the credentials go over the network as plain text; https would keep them")
    with store_unless(dry_run, config) as repository:
        begin = since or prometheus_intake.next_since(repository, settings, options, datetime.now(UTC))
        whole = round((until - begin).total_seconds() * 1000)
        with progress("reading", total=max(0, whole), quiet=as_json, of_time=True) as advance:
            outcome = prometheus_intake.take_in(
                config, repository, begin, until, options, dry_run=dry_run, advance=advance, client=Client(server)
            )
    _report(outcome.summary, shown, as_json=as_json, failure=outcome.failure)
    if outcome.failure is None:
        return 0
    warn(f"slurm-affinode: {outcome.failure}")
    warn(f"  what is before {outcome.until:%Y-%m-%dT%H:%M:%SZ} was taken in; the same command again goes on from there")
    return outcome.failure.exit_code


@contextmanager
def _with_stdin(paths: Sequence[str]) -> Iterator[list[str]]:
    """``paths`` with ``-`` replaced by a file that holds standard input."""
    if "-" not in paths:
        yield list(paths)
        return
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        # The name of the directory says nothing: it must not be taken for that of a node.
        held = Path(directory) / "stdin" / "stdin"
        held.parent.mkdir()
        with held.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield [str(held) if path == "-" else path for path in paths]


def _report(
    summary: IngestSummary, shown: int, *, as_json: bool, failure: AffinodeError | None = None
) -> None:  # fmt: skip
    if as_json:
        print_json({**_as_json(summary), "error": None if failure is None else str(failure)})
        return
    for one in summary.files:
        _print_problems(one, shown)
    if summary.first is not None:
        for name, text in _rows(summary):
            click.echo(printable(f"{name:<11} {text}"))
    elif not summary.failed:
        click.echo(f"nothing new: {len(summary.files):,} files were taken in before and have not changed")
    if summary.dry_run:
        click.echo("dry run: nothing was stored")


def _rows(summary: IngestSummary) -> list[tuple[str, str]]:
    by_status = {word: sum(one.status == word for one in summary.files) for word in ("taken", "known", "failed")}
    words = {"taken": "read", "known": "known already", "failed": "not usable"}
    counted = "server" if any(one.format == "prometheus-api" for one in summary.files) else "files"
    rows = [
        (counted, ", ".join(f"{by_status[word]:,} {words[word]}" for word in words if by_status[word])),
        ("samples", f"{summary.samples:,}"),
    ]
    if not summary.dry_run:
        rows += [("new", f"{summary.new:,}"), ("duplicates", f"{summary.duplicates:,}")]
    rows += [
        ("devices", f"{summary.devices:,} on {summary.nodes:,} nodes"),
        ("from", "unknown" if summary.first is None else f"{clock(summary.first, seconds=True)} ({zone()})"),
        ("to", "unknown" if summary.last is None else clock(summary.last, seconds=True)),
    ]
    if summary.steps_s:
        rows.append(("step", ", ".join(f"{step:g} s ({count:,} devices)" for step, count in summary.steps_s[:5])))
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


def _print_problems(one: FileOutcome, shown: int) -> None:
    if one.error is not None:
        warn(f"slurm-affinode: {one.error}")
        if one.hint:
            warn(f"  {one.hint}")
        return
    lines = (f"{one.path}{'' if p.line is None else f':{p.line}'}: {p.reason}" for p in one.problems)
    warn_of_problems(one.path, lines, one.problem_count, shown)
    for what, count in one.decisions:
        warn(f"{one.path}: {count:,} {what}")


def _as_json(summary: IngestSummary) -> dict[str, Any]:
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
