"""Input and output that ``slurm-affinode ingest gpu`` and ``serving`` share."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted
from slurm_affinode.base.times import utc
from slurm_affinode.cli.ingest_run import (
    AGAIN,
    PROMETHEUS_PERIOD,
    F,
    IngestRun,
    Option,
    cluster_option,
    ingest_options,
    strict_option,
)
from slurm_affinode.cli.options import (
    Span,
    clock,
    echo,
    print_json,
    progress,
    prometheus_options,
    warn,
    zone,
)
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.ingest import FileOutcome, IngestSummary
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.importer import ImportOutcome
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.pipeline import ingest

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SampleInput:
    """The input of a command that ingests samples: files or Prometheus, and how they are read."""

    run: IngestRun
    paths: tuple[str, ...]
    format: str | None
    cluster: str | None
    node: str | None
    start: str | None
    interval_s: float | None
    strict: bool
    again: bool
    since: datetime | None
    until: datetime
    with_prometheus: bool

    def options(self, *, zone: str | None = None, fields: Sequence[str] = ()) -> ReadOptions:
        """Return the options of readers. ``zone``: of times without an offset; ``fields``: columns without a header."""
        return ingest.read_options(
            self.run.config, cluster=self.cluster, node=self.node, zone=zone, start=self.start,
            interval_s=self.interval_s, fields=fields, strict=self.strict,
        )  # fmt: skip

    @contextmanager
    def files(self) -> Iterator[tuple[Repository | None, list[str], Advance]]:
        """Open the database, and yield it with the paths of all files and the function that reports progress."""
        with self.run.store() as repository, with_stdin(self.paths) as input_paths:
            total = sum(inputs.size(path) for path in inputs.expand(input_paths)[0])
            quiet = self.run.as_json or not self.paths
            with progress("reading", total=total, quiet=quiet, of_bytes=True) as advance:
                yield repository, input_paths, advance

    @contextmanager
    def prometheus(
        self, options: ReadOptions, kind: str
    ) -> Iterator[tuple[Repository | None, datetime, Client, Advance]]:
        """Open the database, and yield it with the start of the period, a client, and the function for progress.

        ``kind``: ``gpu`` or ``serving``, whose last ingest is continued.
        """
        server = Server.of(self.run.config.prometheus)
        if server.exposed:
            warn(f"{server.url}: the credentials go over the network as plain text; https would keep them")
        with self.run.store() as repository:
            now, settings = datetime.now(UTC), self.run.config.prometheus
            begin = self.since or ingest.next_since(repository, settings, options, now, kind=kind)
            whole_ms = round((self.until - begin).total_seconds() * 1000)
            with progress("reading", total=max(0, whole_ms), quiet=self.run.as_json, of_time=True) as advance:
                yield repository, begin, Client(server), advance

    def report(
        self,
        summary: IngestSummary,
        failure: AffinodeError | None,
        *,
        json: Callable[[], dict[str, Any]],
        rows: Callable[[], Sequence[tuple[str, str]]],
    ) -> None:
        """Print the result: ``json()`` with the failure, or the problems of each file and ``rows()``."""
        if self.run.as_json:
            print_json({**json(), "error": None if failure is None else str(failure)})
            return
        for file in summary.files:
            print_problems(file, self.run)
        if summary.first is not None:
            for name, text in rows():
                echo(f"{name:<11} {text}")
        elif not summary.failed:
            say_unchanged(summary)
        self.run.say_dry()


def sample_options(
    *,
    format_option: Option,
    node_help: str,
    sample: str,
    interval: str,
    example: str,
    before: Sequence[Option] = (),
    after_node: Sequence[Option] = (),
    after_interval: Sequence[Option] = (),
) -> Callable[[F], F]:
    """Add the options of a command that ingests samples; it receives them in ``source: SampleInput``.

    ``sample`` and ``interval``: names of a sample and of the time between two of them; ``example``: such a time.
    ``before``, ``after_node`` and ``after_interval`` are options of the command itself, by their place in its help.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(
            *, run: IngestRun, paths: tuple[str, ...], format_: str | None, cluster: str | None, node: str | None,
            start: str | None, interval: float | None, strict: bool, again: bool, since: datetime | None,
            until: datetime, with_prometheus: bool, **kwargs: Any,
        ) -> Any:  # fmt: skip
            source = SampleInput(
                run, paths, format_, cluster, node, start, interval, strict, again, since, until, with_prometheus
            )
            return function(source=source, **kwargs)

        decorated: Callable[..., Any] = ingest_options(*PROMETHEUS_PERIOD, connection=(prometheus_options,))(wrapper)
        options: tuple[Option, ...] = (
            click.argument("paths", nargs=-1, type=click.Path(readable=False), metavar="[PATH...]"),
            *before,
            format_option,
            cluster_option("Set the cluster of every sample [default: from the file, else configuration]"),
            click.option("--node", metavar="NAME", help=node_help),
            *after_node,
            click.option("--start", metavar="TIME", help=f"Set the time of the first {sample} in files without times"),
            click.option(
                "--interval", type=Span(), metavar="SPAN",
                help=f"Set the {interval} in files without times, such as {example}",
            ),
            *after_interval,
            strict_option("a file at its first bad line"),
            AGAIN,
        )  # fmt: skip
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[return-value]

    return decorate


def continuation(outcome: ImportOutcome) -> int:
    """Print how to continue after a failure; return the exit status."""
    if outcome.failure is None:
        return 0
    warn(f"slurm-affinode: {outcome.failure}")
    warn(f"  samples before {utc(outcome.until)} are ingested; run the same command again to continue")
    return outcome.failure.exit_code


@contextmanager
def with_stdin(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield ``paths`` with ``-`` replaced by a file with the contents of standard input."""
    if "-" not in paths:
        yield list(paths)
        return
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        # A neutral directory name: that of the temporary directory would be used as the node name.
        copy = Path(directory) / "stdin" / "stdin"
        copy.parent.mkdir()
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield [str(copy) if path == "-" else path for path in paths]


def say_unchanged(summary: IngestSummary) -> None:
    count = len(summary.files)
    files = "1 file was ingested before and is" if count == 1 else f"{count:,} files were ingested before and are"
    echo(f"nothing new: {files} unchanged")


def figures(summary: IngestSummary, *, unit: str = "device") -> list[tuple[str, str]]:
    by_status = {word: sum(file.status == word for file in summary.files) for word in ("taken", "known", "failed")}
    words = {"taken": "read", "known": "known already", "failed": "not usable"}
    sources = "server" if any(file.format == "prometheus-api" for file in summary.files) else "files"
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
    for file in summary.files:
        for name, count in file.unknown:
            counts[name] = counts.get(name, 0) + count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def print_problems(outcome: FileOutcome, run: IngestRun) -> None:
    if outcome.error is not None:
        warn(f"slurm-affinode: {outcome.error}")
        if outcome.hint:
            warn(f"  {outcome.hint}")
        return
    lines = (f"{outcome.path}{'' if p.line is None else f':{p.line}'}: {p.reason}" for p in outcome.problems)
    run.warn_of_problems(outcome.path, lines, outcome.problem_count)
    for what, count in outcome.decisions:
        warn(f"{outcome.path}: {count:,} {what}")


def as_json(summary: IngestSummary) -> dict[str, Any]:
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
        "files": [_file_json(file) for file in summary.files],
    }


def _file_json(outcome: FileOutcome) -> dict[str, Any]:
    return {
        "path": outcome.path,
        "status": outcome.status,
        "format": outcome.format,
        "samples": outcome.samples,
        "first": outcome.first,
        "last": outcome.last,
        "error": outcome.error,
        "hint": outcome.hint,
        "bad_lines": outcome.problem_count,
        "problems": [{"line": problem.line, "reason": problem.reason} for problem in outcome.problems],
        "decisions": dict(outcome.decisions),
        "unknown": dict(outcome.unknown),
    }
