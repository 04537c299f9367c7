"""Summaries that jobstats stores in accounting: ``AdminComment`` is ``JS1:`` and base64 of gzip of JSON.

Per node and GPU (minor number) the summary has ``gpu_utilization`` (percent, averaged over the run),
``gpu_used_memory`` (bytes, the maximum over the run) and ``gpu_total_memory`` (bytes). ``JS1:Short`` and ``JS1:None``
mark runs without a summary. Source: ``jobstats.py`` of PrincetonUniversity/jobstats, which queries ``avg_over_time``
and ``max_over_time``, and rounds values that are not integers to one digit: 0.0 is below 0.05 %, 0 is exactly 0.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from slurm_affinode.metrics import averages
from slurm_affinode.metrics.averages import AVERAGES
from slurm_affinode.metrics.identity import node_name

PREFIX = "JS1:"
WITHOUT = ("JS1:Short", "JS1:None")
LIMIT_BYTES = 16 << 20
"""The largest decoded summary; real ones of large jobs have a few tens of kilobytes."""
_NO_NUMBER = 1e300
"""Values this large are not measurements but damage."""

NOTE = (
    "Memory is the maximum over the run, as jobstats records it: memory-time is an upper bound. A utilization is "
    "rounded to 0.1 %."
)


class SummaryError(ValueError):
    """A ``JS1:`` text that is no valid summary; the message has the reason."""


@dataclass(frozen=True, slots=True)
class GpuSummary:
    """The values of a summary for one GPU of a run. None: unknown."""

    node: str
    gpu: str
    """The minor number, as text."""
    util_pct: float | None
    used_bytes: int | None
    """Maximum over the run."""
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class JobSummaries:
    """The jobstats summaries of an accounting frame."""

    averages: pl.DataFrame
    """``averages.AVERAGES``, one row per run and GPU."""
    summaries: int
    """Runs with a readable summary."""
    without: int
    """Runs that jobstats marked as too short or without data."""
    problems: tuple[str, ...]
    """Runs with an unusable summary, one line each."""

    def samples(self) -> pl.DataFrame:
        """Return the averages as ``SAMPLES``."""
        return averages.samples(self.averages)

    def allocation_gpus(self) -> pl.DataFrame:
        """Return the GPUs of each run as ``ALLOCATION_GPUS``."""
        return averages.allocation_gpus(self.averages)


def is_summary(comment: str | None) -> bool:
    """Return whether an AdminComment was written by jobstats."""
    return comment is not None and comment.startswith(PREFIX)


def decode(comment: str) -> tuple[GpuSummary, ...] | None:
    """Return the GPUs of a summary; None for ``JS1:Short`` and ``JS1:None``. Raises ``SummaryError``."""
    text = comment.strip()
    if not is_summary(text):
        raise SummaryError("does not start with JS1:")
    if text in WITHOUT:
        return None
    try:
        packed = base64.b64decode("".join(text[len(PREFIX) :].split()), validate=True)
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: a gzip header
        plain = unpacker.decompress(packed, LIMIT_BYTES)
    except (binascii.Error, ValueError) as error:
        raise SummaryError(f"is not base64 ({error})") from error
    except zlib.error as error:
        raise SummaryError(f"is not gzip ({error})") from error
    if not unpacker.eof:
        raise SummaryError("is cut short" if not unpacker.unconsumed_tail else "unpacks to more than 16 MiB")
    try:
        summary = json.loads(plain)
    except (ValueError, RecursionError) as error:
        raise SummaryError(f"is not JSON ({error})") from error
    return _gpus(summary)


def _gpus(summary: object) -> tuple[GpuSummary, ...]:
    nodes = summary.get("nodes") if isinstance(summary, dict) else None
    if not isinstance(nodes, dict):
        raise SummaryError("has no nodes")
    gpus = []
    for node, values in nodes.items():
        if not isinstance(values, dict):
            raise SummaryError(f"node {node} has no values")
        util, used, total = (_by_gpu(values, key) for key in ("gpu_utilization", "gpu_used_memory", "gpu_total_memory"))
        gpus += [
            GpuSummary(
                node=node_name(str(node)) or str(node),
                gpu=gpu,
                util_pct=util.get(gpu),
                used_bytes=_whole(used.get(gpu)),
                total_bytes=_whole(total.get(gpu)),
            )
            for gpu in sorted({*util, *used, *total}, key=lambda name: (len(name), name))
        ]
    return tuple(gpus)


def _by_gpu(values: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return the number per GPU under ``key``. A value that is no number is unknown, not 0."""
    entries = values.get(key)
    if not isinstance(entries, dict):
        return {}
    return {
        str(gpu): float(value)
        for gpu, value in entries.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _NO_NUMBER
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def find(jobs: pl.DataFrame) -> JobSummaries:
    """Find the summaries in the ``admin_comment`` of a ``JOBS`` frame.

    A run needs a start and an end, because a summary is written when a run ends. A summary that cannot be read is
    reported and skipped.
    """
    rows: list[dict[str, object]] = []
    problems: list[str] = []
    summaries = without = 0
    with_summary = jobs.filter(pl.col("admin_comment").str.starts_with(PREFIX))
    for run in with_summary.select("cluster", "job_id", "start", "end", "admin_comment").iter_rows(named=True):
        try:
            gpus = decode(run["admin_comment"])
        except SummaryError as error:
            problems.append(f"job {run['job_id']}: AdminComment {error}")
            continue
        if gpus is None:
            without += 1
            continue
        if run["start"] is None or run["end"] is None:
            problems.append(f"job {run['job_id']}: has a jobstats summary but no start or end")
            continue
        summaries += 1
        rows += [_row(run, gpu) for gpu in gpus]
    frame = pl.DataFrame(rows, schema=AVERAGES, orient="row", infer_schema_length=None)
    return JobSummaries(frame, summaries, without, tuple(problems))


def _row(run: Mapping[str, object], gpu: GpuSummary) -> dict[str, object]:
    number = int(gpu.gpu) if gpu.gpu.isdecimal() and len(gpu.gpu) < 5 else None
    return {
        "job_id": run["job_id"], "start": run["start"], "end": run["end"],
        "cluster": run["cluster"], "node": gpu.node, "index": number, "uuid": None if number is not None else gpu.gpu,
        "util_pct": gpu.util_pct,
        "fb_used_mib": None if gpu.used_bytes is None else gpu.used_bytes / (1 << 20),
        "fb_total_mib": None if gpu.total_bytes is None else gpu.total_bytes / (1 << 20),
    }  # fmt: skip
