"""A ``WasteResult`` to files: ``report.html``, ``summary.json`` and, if asked, CSV.

Everything is made in memory before the first file is touched, and each file appears whole or not at all.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode import files
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.errors import AffinodeError
from slurm_affinode.report import export
from slurm_affinode.report.assemble import render_report
from slurm_affinode.report.summary import Summary, build_summary, headline_rows, to_json

DEFAULT_TITLE = "GPU waste report"
DEFAULT_TOP = 15


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """What was written, and where."""

    report: Path
    summary_path: Path
    csv: tuple[Path, ...]
    summary: Summary
    headline: tuple[tuple[str, str, str], ...]
    """For a terminal: what, GPU-hours, share of the allocated."""
    result: WasteResult


def write_report(
    result: WasteResult, out: Path, *, title: str = DEFAULT_TITLE, top: int = DEFAULT_TOP, csv: bool = False
) -> WrittenReport:
    """Write the report of ``result`` into the directory ``out``, which is made if need be.

    Raises ``AffinodeError`` where ``out`` cannot be written; files of an earlier report are then still whole.
    """
    html = render_report(result, title=title, top=top, csv_name=export.JOBS if csv else None)
    summary = build_summary(result, title=title, top=top)
    content: dict[str, bytes] = {"summary.json": to_json(summary).encode("utf-8")}
    if csv:
        content.update(export.csv_files(result))
    content["report.html"] = html.encode("utf-8")
    check_directory(out)
    for name, data in content.items():
        _write(out / name, data)
    return WrittenReport(
        report=out / "report.html",
        summary_path=out / "summary.json",
        csv=tuple(out / name for name in content if name.endswith(".csv")),
        summary=summary,
        headline=tuple(headline_rows(result)),
        result=result,
    )


def check_directory(out: Path) -> None:
    """Make ``out`` if it is absent; raise ``AffinodeError`` unless it is a directory that can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with files.replacing(out / ".probe") as probe:
            probe.write_bytes(b"")
        (out / ".probe").unlink()
    except OSError as error:
        raise _unwritable(out, error) from error


def _write(path: Path, data: bytes) -> None:
    try:
        with files.replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> AffinodeError:
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, FileExistsError | NotADirectoryError):
        return AffinodeError(f"{path}: is not a directory", hint="give --out a directory, or a name that is not taken")
    if error.errno == errno.ENOSPC:
        hint = "the file system is full: free some space, or give --out another place"
    else:
        hint = "give --out a directory that you can write"
    return AffinodeError(f"{path}: cannot be written: {reason}", hint=hint)
