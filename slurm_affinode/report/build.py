"""A ``WasteResult`` to files: ``report.html``, ``summary.json`` and, if asked, CSV.

Everything is made in memory before the first file is touched, and all files appear, each whole, or none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
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
    content = {"report.html": html.encode(), "summary.json": to_json(summary).encode()}
    if csv:
        content |= export.csv_files(result)
    write_files(out, content)
    return WrittenReport(
        report=out / "report.html",
        summary_path=out / "summary.json",
        csv=tuple(out / name for name in content if name.endswith(".csv")),
        summary=summary,
        headline=tuple(headline_rows(result)),
        result=result,
    )


def write_files(out: Path, content: Mapping[str, bytes]) -> None:
    """Write all of ``content`` (name -> bytes) into the directory ``out``, or none of it.

    Raises ``AffinodeError`` where ``out`` cannot be written.
    """
    with writable(out), contextlib.ExitStack() as together:
        try:
            for name, data in content.items():
                with together.enter_context(files.replacing(out / name)).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())  # what does not fit is told before the first file has its name
            together.close()
        except OSError as error:
            raise _unwritable(Path(error.filename or out), error) from error


@contextlib.contextmanager
def writable(out: Path) -> Iterator[None]:
    """Make the directory ``out`` if it is absent; where the body fails, directories that were made for nothing go.

    Raises ``AffinodeError`` unless it is a directory that can be written.
    """
    absent = [path for path in (out, *out.parents) if not os.path.exists(path)]  # noqa: PTH110 - never raises
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=out, prefix=".probe-"):
                pass
        except OSError as error:
            raise _unwritable(out, error) from error
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something is in it
            for path in absent:
                path.rmdir()
        raise


def _unwritable(path: Path, error: OSError) -> AffinodeError:
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, FileExistsError | NotADirectoryError):
        return AffinodeError(f"{path}: is not a directory", hint="give --out a directory, or a name that is not taken")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "the file system is full: free some space, or give --out another place"
    else:
        hint = "give --out a directory that you can write"
    return AffinodeError(f"{path}: cannot be written: {reason}", hint=hint)
