"""CSV files of a report, safe to open in a spreadsheet.

UTF-8 with a header line, RFC 4180 quoting, times in ISO 8601 with ``Z``, unknown as an empty field. A text that a
spreadsheet may take for a formula gets an apostrophe in front: it begins with ``= + - @`` or one of their wide forms,
also behind spaces, control and invisible characters, which spreadsheets drop; or with a tab or a line end. Numbers are
left as they are. Source: OWASP, "CSV Injection".
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import polars as pl

from slurm_affinode.analysis.result import WasteResult

_FORMULA = r"^(?:[\t\r\n\x0B\f]|[\s\p{Z}\p{C}\p{M}]*[=+\-@＝＋－＠﹦﹢﹣﹫−])"
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


def csv_files(result: WasteResult) -> Mapping[str, bytes]:
    """File name -> content: all job runs, every grouping, and the time series."""
    files = {JOBS: to_csv(result.jobs), "over_time.csv": to_csv(result.over_time)}
    if result.suspensions is not None and not result.suspensions.is_empty():
        files["suspensions.csv"] = to_csv(result.suspensions)
    for word, frame in result.groups.items():
        files[_NAMES.get(word, f"{word}.csv")] = to_csv(frame)
    return files


def to_csv(frame: pl.DataFrame) -> bytes:
    """``frame`` as CSV bytes."""
    safe = frame.with_columns(
        pl.when(pl.col(pl.String).str.contains(_FORMULA))
        .then(pl.lit("'") + pl.col(pl.String))
        .otherwise(pl.col(pl.String))
        .str.replace_all("\0", "\N{SYMBOL FOR NULL}", literal=True)
        .name.keep()
    )
    buffer = io.BytesIO()
    safe.write_csv(buffer, datetime_format="%Y-%m-%dT%H:%M:%SZ", null_value="", line_terminator="\r\n")
    return buffer.getvalue()
