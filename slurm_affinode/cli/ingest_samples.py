"""Input and output that ``slurm-affinode ingest gpu`` and ``serving`` share."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from slurm_affinode.base.text import counted
from slurm_affinode.base.times import utc
from slurm_affinode.cli.ingest_run import (
    IngestRun,
)
from slurm_affinode.cli.options import (
    clock,
    echo,
    progress,
    warn,
    zone,
)
from slurm_affinode.metrics.ingest import FileOutcome, IngestSummary
from slurm_affinode.metrics.prometheus.importer import ImportOutcome
from slurm_affinode.metrics.prometheus.server import Server


def prometheus_server(run: IngestRun) -> Server:
    server = Server.of(run.config.prometheus)
    if server.exposed:
        warn(f"{server.url}: the credentials go over the network as plain text; https would keep them")
    return server


def progress_of_time(run: IngestRun, begin: datetime, until: datetime) -> AbstractContextManager[Callable[[int], None]]:
    whole = round((until - begin).total_seconds() * 1000)
    return progress("reading", total=max(0, whole), quiet=run.as_json, of_time=True)


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
        held = Path(directory) / "stdin" / "stdin"
        held.parent.mkdir()
        with held.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield [str(held) if path == "-" else path for path in paths]


def say_unchanged(summary: IngestSummary) -> None:
    count = len(summary.files)
    files = "1 file was ingested before and is" if count == 1 else f"{count:,} files were ingested before and are"
    echo(f"nothing new: {files} unchanged")


def figures(summary: IngestSummary, *, unit: str = "device") -> list[tuple[str, str]]:
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


def print_problems(one: FileOutcome, run: IngestRun) -> None:
    if one.error is not None:
        warn(f"slurm-affinode: {one.error}")
        if one.hint:
            warn(f"  {one.hint}")
        return
    lines = (f"{one.path}{'' if p.line is None else f':{p.line}'}: {p.reason}" for p in one.problems)
    run.warn_of_problems(one.path, lines, one.problem_count)
    for what, count in one.decisions:
        warn(f"{one.path}: {count:,} {what}")


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
