"""Files of a report: ``report.html``, ``summary.json``, pages of model servers and, on request, CSV.

All contents are rendered in memory before the first file is written; either all files appear, each complete, or none.

CSV: UTF-8 with a header line, RFC 4180 quoting, times in ISO 8601 with ``Z``, unknown as an empty field. Text that a
spreadsheet could interpret as a formula gets a leading apostrophe: text that begins with ``= + - @`` or one of their
wide forms, also after spaces, control and invisible characters, or with a tab or line end. Source: OWASP, "CSV
Injection". Characters that a terminal would interpret or not show are made visible as in the HTML
(``base.text.visible``): a job name is one line, and does nothing to a terminal. Numbers are unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import tempfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base import files
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import visible
from slurm_affinode.report.context import ReplayNote
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.pages import render_report
from slurm_affinode.report.summary import Summary, build_summary, headline_rows, to_json

_FORMULA = r"^(?:[\t\r\n\x0B\f]|[\s\p{Z}\p{C}\p{M}]*[=+\-@＝＋－＠﹦﹢﹣﹫−])"
_UNSHOWN = r"[\p{C}\p{Z}--\x20]"
_NAMES = {
    "user": "users.csv",
    "account": "accounts.csv",
    "partition": "partitions.csv",
    "qos": "qos.csv",
    "node": "nodes.csv",
    "gpu_model": "gpu_models.csv",
    "cluster": "clusters.csv",
}
JOBS = "jobs.csv"
REPORT = "report.html"
_SERVER_PAGE = re.compile(r"server-[0-9a-f]{16}\.html")


def csv_files(result: WasteResult) -> Mapping[str, bytes]:
    """Return file name -> content: all job runs, all groupings, GPUs, suspensions, engines, and the time series."""
    files = {JOBS: to_csv(result.jobs), "over_time.csv": to_csv(result.over_time)}
    if result.gpus is not None:
        files["gpus.csv"] = to_csv(result.gpus)
    if result.suspensions is not None and not result.suspensions.is_empty():
        files["suspensions.csv"] = to_csv(result.suspensions)
    if result.servers is not None:
        from slurm_affinode.engines.diagnosis.usage import table  # noqa: PLC0415 - many sites have no model servers

        files["servers.csv"] = to_csv(table(result.servers.engines))
    for word, frame in result.groups.items():
        files[_NAMES.get(word, f"{word}.csv")] = to_csv(frame)
    return files


def to_csv(frame: pl.DataFrame) -> bytes:
    """Return ``frame`` as CSV bytes."""
    quoted = frame.with_columns(
        pl.when(pl.col(pl.String).str.contains(_FORMULA))
        .then(pl.lit("'") + pl.col(pl.String))
        .otherwise(pl.col(pl.String))
        .name.keep()
    )
    safe = quoted.with_columns(_shown(column) for column in quoted.select(pl.col(pl.String)))
    buffer = io.BytesIO()
    safe.write_csv(buffer, datetime_format="%Y-%m-%dT%H:%M:%SZ", null_value="", line_terminator="\r\n")
    return buffer.getvalue()


def _shown(column: pl.Series) -> pl.Series:
    unprintable = column.filter(column.str.contains(_UNSHOWN)).unique()
    return column.replace(unprintable, [visible(text) for text in unprintable]) if len(unprintable) else column


DEFAULT_TITLE = "GPU waste report"
DEFAULT_TOP = 15


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The files written, and their main contents."""

    report: Path
    summary_path: Path
    csv: tuple[Path, ...]
    summary: Summary
    headline: tuple[tuple[str, str, str], ...]
    """Rows for a terminal: label, GPU-hours, share of the allocated hours."""
    result: WasteResult


def _server_pages(result: WasteResult) -> Mapping[str, str]:
    if result.servers is None:
        return {}
    from slurm_affinode.report.servers_page import pages  # noqa: PLC0415 - many sites have no model servers

    return pages(result.servers, result.query, result.generated, REPORT)


def write_report(
    result: WasteResult,
    out: Path,
    *,
    title: str = DEFAULT_TITLE,
    top: int = DEFAULT_TOP,
    csv: bool = False,
    links: Links = NO_LINKS,
    replay: ReplayNote | None = None,
) -> WrittenReport:
    """Write the report of ``result`` to the directory ``out``, which is created if needed.

    ``links``: pages that it links to; ``replay``: a what-if for the same interval.

    Raises ``AffinodeError`` if ``out`` cannot be written; the files of an earlier report are then still intact.
    """
    html = render_report(result, title=title, top=top, csv_name=JOBS if csv else None, links=links, replay=replay)
    summary = build_summary(result, title=title, top=top)
    servers = _server_pages(result)
    # The pages that the report links to come first.
    content = {name: text.encode() for name, text in servers.items()}
    content |= {REPORT: html.encode(), "summary.json": to_json(summary).encode()}
    if csv:
        content |= csv_files(result)
    write_files(out, content)
    _remove_old_pages(out, servers)
    return WrittenReport(
        report=out / REPORT,
        summary_path=out / "summary.json",
        csv=tuple(out / name for name in content if name.endswith(".csv")),
        summary=summary,
        headline=tuple(headline_rows(result)),
        result=result,
    )


def _remove_old_pages(out: Path, current: Container[str]) -> None:
    """Delete pages of engines that an earlier report in the same directory had."""
    for path in out.glob("server-*.html"):
        if _SERVER_PAGE.fullmatch(path.name) and path.name not in current:
            with contextlib.suppress(OSError):
                path.unlink()


def write_files(out: Path, content: Mapping[str, bytes]) -> None:
    """Write all of ``content`` (name -> bytes) to the directory ``out``, or none of it.

    Raises ``AffinodeError`` if ``out`` cannot be written.
    """
    with writable(out), contextlib.ExitStack() as together:
        try:
            for name, data in content.items():
                with together.enter_context(files.replacing(out / name)).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())  # a full disk is reported before the first rename
            together.close()
        except OSError as error:
            raise _unwritable(Path(error.filename or out), error) from error


@contextlib.contextmanager
def writable(out: Path) -> Iterator[None]:
    """Create the directory ``out`` if it is absent; if the body fails, remove the created directories if empty.

    Raises ``AffinodeError`` if ``out`` is not a writable directory.
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
        with contextlib.suppress(OSError):  # not empty
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
