"""Reader of the Azure LLM inference traces (``Azure/AzurePublicDataset``): 2023, 2024, and LMM 2025 with images.

A file is CSV, plain or compressed, with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``, in 2025 ``NumImages``.
Times have up to nine digits of a fraction, and an offset or none; without one they are UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError

REQUESTS: dict[str, pl.DataType] = {
    "time": pl.Datetime("us", "UTC"),
    "context": pl.Int64(),  # tokens of the prompt
    "generated": pl.Int64(),  # tokens of the answer
    "images": pl.Int64(),  # images in the prompt; None: not in this trace
}
"""Columns of a request, in the order of arrival."""

_NAMES = {"timestamp": "time", "contexttokens": "context", "generatedtokens": "generated", "numimages": "images"}
_NEEDED = ("time", "context", "generated")
_OFFSET = r"(?:Z|[+-]\d{2}:?\d{2})$"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The requests of one file."""

    name: str
    """File name without its endings."""
    requests: pl.DataFrame
    """Schema ``REQUESTS``, sorted by time."""
    rows: int
    """Rows of the file, good and bad."""
    problems: tuple[str, ...]
    """Rows that could not be used: the first ones by line, and how many more."""


def read(path: Path) -> RequestTrace:
    """Read one file. Raises ``InputError`` if it cannot be read, is another format, or has no usable row."""
    where = str(path)
    try:
        table = pl.scan_csv(path, infer_schema=False, truncate_ragged_lines=True, ignore_errors=True)
        header = table.collect_schema().names()
        columns = {_NAMES[name.strip().lower()]: name for name in header if name.strip().lower() in _NAMES}
        missing = [name for name in _NEEDED if name not in columns]
        if missing:
            raise InputError(
                f"not a trace of requests: the header is {','.join(header)[:200]}",
                where=where, hint="expected TIMESTAMP,ContextTokens,GeneratedTokens",
            )  # fmt: skip
        raw = pl.col(columns["time"]).str.strip_chars()
        # Polars reads fractions of up to nine digits; offsets only where every row has one.
        offset = raw.str.extract(rf"({_OFFSET})").str.replace("Z", "+0000").str.replace(":", "")
        seconds = (
            pl.when(offset.is_null()).then(0)
            .otherwise(
                (offset.str.slice(1, 2).cast(pl.Int64, strict=False) * 3600
                 + offset.str.slice(3, 2).cast(pl.Int64, strict=False) * 60)
                * pl.when(offset.str.starts_with("-")).then(-1).otherwise(1)
            )
        )  # fmt: skip
        local = raw.str.replace(_OFFSET, "").str.replace("T", " ").str.to_datetime(
            "%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False
        )  # fmt: skip
        whole = {
            name: pl.col(columns[name]).str.strip_chars().cast(pl.Int64, strict=False) if name in columns
            else pl.lit(None, pl.Int64) for name in ("context", "generated", "images")
        }  # fmt: skip
        frame = table.select(
            (local - pl.duration(seconds=seconds)).dt.replace_time_zone("UTC").alias("time"),
            *(column.alias(name) for name, column in whole.items()),
        ).collect(engine="streaming")
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"cannot be read: {_reason(error)}", where=where) from error
    bad = pl.any_horizontal(pl.col(name).is_null() for name in _NEEDED) | (pl.col("context") < 0)
    bad = bad | (pl.col("generated") < 0)
    lines = frame.select(pl.arg_where(bad)).to_series()
    good = frame.filter(~bad).sort("time", maintain_order=True)
    if good.is_empty():
        raise InputError("no row with a time and two counts of tokens", where=where)
    problems = [f"{where}: line {line + 2}: no time or no count of tokens; left out" for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        problems.append(f"{where}: {len(lines) - _SHOWN:,} more such lines")
    name = path.name.split(".")[0]
    return RequestTrace(name, good.select(*REQUESTS), frame.height, tuple(problems))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "input/output error"
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
