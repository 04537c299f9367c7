"""Reader of the Alibaba GenAI serving trace 2026 (GenTD26, ``alibaba/clusterdata``, cluster-trace-v2026-GenAI).

The tables are CSV files, each published as an archive of its own; column order varies between them. The metric
tables have ``timestamp_anon`` (seconds, shifted), ``value`` and ``container_ip`` (a hash, the pod). One table,
``data_trace_processed``, has one row per request.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from slurm_affinode.errors import InputError
from slurm_affinode.history.traces.archive import Table, find_tables

METRIC_COLUMNS = ("timestamp_anon", "value", "container_ip")
REQUEST_COLUMNS = ("exec_time_seconds", "checkpoint_model_version_id", "lora_args")

METRIC_TABLES: Mapping[str, tuple[str, ...]] = {
    # our name -> names under which the table is published, without ".csv"
    "gpu_duty_cycle": ("pod_gpu_duty_cycle_anon",),  # percent
    "gpu_memory": ("pod_gpu_memory_used_bytes_anon",),  # bytes
    "host_memory": ("pod_memory_util_anon",),  # a fraction 0-1, although its page says percent
    "load_base_model": ("basemodel_update_latency_anon", "base_model_update_latency_anon"),  # ms
    "load_lora": ("lora_update_latency_anon",),  # ms
    "load_controlnet": ("controlnet_latency_data_anon", "controlnet_update_latency_anon"),  # ms
    "load_pipeline": ("pipeline_update_latency_anon",),  # ms
    "predict": ("model_predict_data_anon",),  # ms
    "pipeline_inference": ("pipeline_inference_data_anon",),  # ms
    "queue_time": ("queue_rt_raw_anon",),  # ms
    "queue_size": ("queue_size_raw_anon",),  # requests
}
REQUESTS = "data_trace_processed"
NEEDED_FOR: Mapping[str, str] = {
    "gpu_duty_cycle": "utilization, idle samples, idle memory",
    "gpu_memory": "memory held, idle memory",
    REQUESTS: "requests, execution time, models, popularity",
    "load_base_model": "base model load latency",
    "load_lora": "LoRA load latency",
    "load_controlnet": "ControlNet load latency",
    "load_pipeline": "pipeline load latency",
    "host_memory": "host memory",
    "predict": "inference time",
    "pipeline_inference": "end-to-end inference time",
    "queue_time": "queue time",
    "queue_size": "queue length",
}

_NAMES = {alias: name for name, aliases in METRIC_TABLES.items() for alias in aliases} | {REQUESTS: REQUESTS}
_NO_POD = ("", "NULL", "None")


@dataclass(frozen=True, slots=True)
class GenTrace:
    """What was found of the trace. A table that was not found is absent from ``metrics``, or None."""

    metrics: Mapping[str, pl.DataFrame]
    """Key of ``METRIC_TABLES`` -> ``time_s`` (float, seconds, shifted), ``pod`` (None: not said), ``value``."""
    requests: pl.DataFrame | None
    """``exec_time_s``, ``base_model`` (None: not said), ``loras`` (list of ids): a row per request."""
    sources: Mapping[str, str]
    """Our table name -> the file, and the member in it, that was read."""
    notes: tuple[str, ...]
    """What was missing or dropped, one line each."""


def read(paths: Iterable[Path], *, on_file: Callable[[Path], None] = lambda _: None) -> GenTrace:
    """Read the trace from directories, archives and CSV files, in any mixture.

    A table that is there twice (an archive and the file extracted from it) is taken once. Raises ``InputError`` where
    no table is found, a file is damaged, a header or a value is wrong, or two sources of a table differ.
    """
    paths = list(paths)
    found: dict[str, tuple[Table, str]] = {}
    for table in find_tables(paths, lambda name: name.lower() in _NAMES, on_file=on_file):
        name = _NAMES[table.name.lower()]
        digest = hashlib.sha256(table.data).hexdigest()
        if name not in found:
            found[name] = (table, digest)
        elif found[name][1] != digest:
            raise InputError(
                f"differs from {found[name][0].where}, which has the same table",
                where=table.where,
                hint="keep one of the two",
            )
    if not found:
        raise InputError(
            "no table of GenTD26 here",
            where=", ".join(map(str, paths)),
            hint="give the directory with pod_gpu_duty_cycle_anon.tar.gz and the other archives, or the CSV files",
        )
    notes: list[str] = []
    metrics = {name: _metric(found[name][0], notes) for name in METRIC_TABLES if name in found}
    requests = _requests(found[REQUESTS][0], notes) if REQUESTS in found else None
    notes += [
        f"{_published(name)} is not there: {what} unknown" for name, what in NEEDED_FOR.items() if name not in found
    ]
    return GenTrace(metrics, requests, {name: table.where for name, (table, _) in found.items()}, tuple(notes))


def _published(name: str) -> str:
    return f"{METRIC_TABLES[name][0] if name in METRIC_TABLES else name}.csv"


def _read_csv(table: Table, columns: tuple[str, ...], notes: list[str]) -> pl.DataFrame:
    """The columns of the table as text, in the order asked; raises ``InputError`` for anything that is not that CSV."""
    if not table.data.strip():
        raise InputError("the table is empty", where=table.where)
    if not table.data.endswith(b"\n"):
        notes.append(f"{table.name}.csv: the last line has no newline: the table may have been cut")
    header = table.data.split(b"\n", 1)[0].decode("utf-8", "replace").lstrip("\N{BOM}").strip()
    try:
        frame = pl.read_csv(io.BytesIO(table.data), infer_schema=False, encoding="utf8-lossy", raise_if_empty=False)
    except pl.exceptions.PolarsError as error:
        line = _wide_row(table.data)
        reason = "more fields than the header" if line else str(error).splitlines()[0]
        raise InputError(f"not a CSV table: {reason}", where=f"{table.where}{f':{line}' if line else ''}") from error
    frame = frame.rename({name: name.strip().lstrip("\N{BOM}") for name in frame.columns})
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}; its header is {header[:200]!r}",
            where=table.where,
            hint=f"the columns {', '.join(columns)} are needed, in any order",
        )
    return frame.select(columns)


def _wide_row(data: bytes) -> int | None:
    """The line of the first row with more fields than the header."""
    rows = csv.reader(io.StringIO(data.decode("utf-8", "replace"), newline=""))
    try:
        width = len(next(rows, []))
        return next((rows.line_num for row in rows if len(row) > width), None)
    except csv.Error:
        return None


def _number(frame: pl.DataFrame, column: str, where: str) -> pl.Series:
    """The column as floats; empty cells are null. Raises ``InputError`` naming the first cell that is no number."""
    text = frame[column].str.strip_chars()
    values = text.cast(pl.Float64, strict=False)
    bad = (values.is_null() & text.is_not_null() & (text != "")) | values.is_nan() | values.is_infinite()
    if bad.any():
        at = int(bad.fill_null(value=False).arg_max() or 0)
        raise InputError(f"{column} is {text[at]!r}, not a number", where=f"{where}, record {at + 1}")
    return values


def _metric(table: Table, notes: list[str]) -> pl.DataFrame:
    raw = _read_csv(table, METRIC_COLUMNS, notes)
    frame = pl.DataFrame(
        {
            "time_s": _number(raw, "timestamp_anon", table.where),
            "pod": raw["container_ip"].str.strip_chars(),
            "value": _number(raw, "value", table.where),
        }
    ).with_columns(pl.when(pl.col("pod").is_in(_NO_POD)).then(None).otherwise(pl.col("pod")).alias("pod"))
    complete = frame.drop_nulls(["time_s", "value"])
    if complete.height < frame.height:
        notes.append(f"{table.name}.csv: {frame.height - complete.height} rows without a time or a value left out")
    return complete


def _requests(table: Table, notes: list[str]) -> pl.DataFrame:
    raw = _read_csv(table, REQUEST_COLUMNS, notes)
    loras = {text: _lora_ids(text, table.where) for text in raw["lora_args"].unique().to_list()}
    models = raw["checkpoint_model_version_id"].str.strip_chars()
    frame = pl.DataFrame(
        {
            "exec_time_s": _number(raw, "exec_time_seconds", table.where),
            "base_model": models,
            "loras": pl.Series([loras[text] for text in raw["lora_args"].to_list()], dtype=pl.List(pl.String)),
        }
    ).with_columns(pl.when(pl.col("base_model").is_in(_NO_POD)).then(None).otherwise("base_model").alias("base_model"))
    unnamed = frame["base_model"].null_count()
    if unnamed:
        notes.append(f"{table.name}.csv: {unnamed} requests do not name a base model; popularity leaves them out")
    return frame


def _lora_ids(text: str | None, where: str) -> list[str]:
    """Ids of the adapters in a cell like ``[{'modelVersionId': 'ab12', 'scale': 1.0}]``, a Python literal."""
    if text is None or not text.strip():
        return []
    try:
        value = ast.literal_eval(text.strip())
        return [str(item["modelVersionId"]) for item in value]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise InputError(f"lora_args is {text[:80]!r}, not a list of {{'modelVersionId': ...}}", where=where) from error
