"""Reader of the Alibaba GenAI serving trace 2026 (GenTD26, ``alibaba/clusterdata``, cluster-trace-v2026-GenAI).

The tables are CSV files, plain, compressed, or members of tar and zip archives; column order varies. The metric tables
have ``timestamp_anon`` (seconds, shifted), ``value`` and ``container_ip`` (a hash of the pod). ``data_trace_processed``
has one row per request.

Members are read into memory and never written to disk, so the path of a member has no effect. Links and devices in an
archive are skipped, and sizes are limited.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.limits import TRACE_ARCHIVE_BYTES, TRACE_TABLE_BYTES
from slurm_affinode.base.text import counted, size

_TAR_GZ = (".tar.gz", ".tgz")
_TAR_XZ = (".tar.xz", ".txz")
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)


@dataclass(frozen=True, slots=True)
class TraceTable:
    """A CSV table as found: name without ``.csv``, contents, and location."""

    name: str
    data: bytes
    where: str


class _TooLargeError(Exception):
    """An archive unpacks to more than its limit."""


class _Limited(io.RawIOBase):
    """A reader that raises ``_TooLargeError`` after more than ``limit`` bytes."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        super().__init__()
        self._source = source
        self._remaining_bytes = limit

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer``. Raises ``_TooLargeError``."""
        chunk = self._source.read(len(buffer))
        self._remaining_bytes -= len(chunk)
        if self._remaining_bytes < 0:
            raise _TooLargeError
        buffer[: len(chunk)] = chunk
        return len(chunk)


def find_tables(
    paths: Iterable[Path],
    selects: Callable[[str], bool],
    *,
    member_limit: int = TRACE_TABLE_BYTES,
    archive_limit: int = TRACE_ARCHIVE_BYTES,
    on_file: Callable[[Path], None] = lambda _: None,
) -> Iterator[TraceTable]:
    """Yield every table whose name (without ``.csv``, any case kept) is ``selects``.

    ``paths`` are directories, which are searched recursively, and files. ``on_file`` is called with each file before it
    is read. Raises ``InputError`` for a path that does not exist or cannot be read, a damaged archive, and a table or
    archive over its limit.
    """
    for path in paths:
        for file in _files(path):
            on_file(file)
            yield from _tables_of(file, selects, member_limit, archive_limit)


def _files(path: Path) -> list[Path]:
    """Return the file itself, or the files of supported kinds below the directory, sorted."""
    try:
        if not path.is_dir():
            if not path.exists():
                raise InputError("no such file or directory", where=str(path))
            if _kind(path.name) is None:
                raise InputError("neither a CSV file nor an archive of them", where=str(path))
            return [path]
        files = [file for file in path.rglob("*") if _kind(file.name) and not _is_sidecar(file.name) and file.is_file()]
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", where=str(path)) from error
    return sorted(files)


def _kind(name: str) -> str | None:
    lower = name.lower()
    if lower.endswith(_TAR_GZ):
        return "tar.gz"
    if lower.endswith(_TAR_XZ):
        return "tar.xz"
    for ending in (".tar", ".zip", ".csv", ".csv.gz"):
        if lower.endswith(ending):
            return ending[1:]
    return None


def _is_sidecar(name: str) -> bool:
    """Return whether macOS added the file beside another one (``._name``, ``__MACOSX/``): attributes, never data."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or "__MACOSX" in path.parts


def _table_name(member: str) -> str | None:
    """Return the name of the table in the member ``a/b/name.csv``; None if the member is no table."""
    name = PurePosixPath(member).name
    if _is_sidecar(member) or not name.lower().endswith(".csv"):
        return None
    return name[: -len(".csv")]


def _tables_of(
    file: Path, selects: Callable[[str], bool], member_limit: int, archive_limit: int
) -> Iterator[TraceTable]:
    kind = _kind(file.name)
    where = str(file)
    try:
        if kind in ("csv", "csv.gz"):
            name = file.name[: -len(f".{kind}")]
            if selects(name):
                with _open(file, kind) as source:
                    yield TraceTable(name, _read_limited(source, member_limit, where), where)
        elif kind == "zip":
            yield from _zip_tables(file, selects, member_limit, archive_limit)
        else:
            yield from _tar_tables(file, kind, selects, member_limit, archive_limit)
    except _DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise InputError(
            f"damaged or cut short ({reason})", where=where, hint="fetch the archive again and compare its size"
        ) from error
    except _TooLargeError as error:
        raise InputError(f"unpacks to more than {size(archive_limit)}", where=where) from error
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror or error}", where=where) from error


def _tar_tables(
    file: Path, kind: str | None, selects: Callable[[str], bool], member_limit: int, archive_limit: int
) -> Iterator[TraceTable]:
    with _open(file, kind) as unpacked:
        limited = io.BufferedReader(_Limited(unpacked, archive_limit), 1 << 20)
        with tarfile.open(fileobj=limited, mode="r|") as archive:
            for member in archive:
                name = _table_name(member.name)
                if name is None or not member.isfile() or not selects(name):
                    continue
                where = f"{file}: {member.name}"
                if member.size > member_limit:
                    raise InputError(f"larger than {size(member_limit)}", where=where)
                content = archive.extractfile(member)
                data = content.read() if content is not None else b""
                if len(data) != member.size:
                    raise EOFError(f"{member.name} ends after {len(data)} of {member.size} bytes")
                yield TraceTable(name, data, where)
        while limited.read(1 << 20):  # to the end of the stream, where the checksum is compared
            pass


def _open(file: Path, kind: str | None) -> IO[bytes]:
    if kind in ("tar.gz", "csv.gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if kind == "tar.xz":
        return lzma.open(file, "rb")
    return file.open("rb")


def _zip_tables(
    file: Path, selects: Callable[[str], bool], member_limit: int, archive_limit: int
) -> Iterator[TraceTable]:
    total = 0
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = _table_name(member.filename)
            if name is None or not selects(name):
                continue
            where = f"{file}: {member.filename}"
            if member.flag_bits & 1:
                raise InputError("is encrypted", where=where)
            with archive.open(member) as content:
                data = _read_limited(content, member_limit, where)
            total += len(data)
            if total > archive_limit:
                raise _TooLargeError
            yield TraceTable(name, data, where)


def _read_limited(source: IO[bytes], limit: int, where: str) -> bytes:
    data = source.read(limit + 1)
    if len(data) > limit:
        raise InputError(f"larger than {size(limit)}", where=where)
    return data


METRIC_COLUMNS = ("timestamp_anon", "value", "container_ip")
REQUEST_COLUMNS = ("exec_time_seconds", "checkpoint_model_version_id", "lora_args")

METRIC_TABLES: Mapping[str, tuple[str, ...]] = {
    # key -> names under which the table is published, without ".csv"
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
TIMED_REQUESTS = "lora_request_trace"
_TIMED_COLUMNS = ("gmt_create", "exec_time_seconds", "checkpoint_model_version_id")
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
    """The tables of the trace. A table that was not found is absent from ``metrics``, or None."""

    metrics: Mapping[str, pl.DataFrame]
    """Key of ``METRIC_TABLES`` -> ``time_s`` (float, seconds, shifted), ``pod`` (None: unknown), ``value``."""
    requests: pl.DataFrame | None
    """``exec_time_s``, ``base_model`` (None: unknown), ``loras`` (list of IDs): one row per request."""
    sources: Mapping[str, str]
    """Key of the table -> the file that was read, with its archive member."""
    notes: tuple[str, ...]
    """Missing tables and dropped rows, one line each."""


def read(paths: Iterable[Path], *, on_file: Callable[[Path], None] = lambda _: None) -> GenTrace:
    """Read the trace from any mixture of directories, archives and CSV files.

    A table that exists twice (an archive and the file extracted from it) is read once. Raises ``InputError`` if no
    table is found, a file is damaged, a header or a value is wrong, or two sources of a table differ.
    """
    paths = list(paths)
    tables: dict[str, tuple[TraceTable, str]] = {}
    for table in find_tables(paths, lambda name: name.lower() in _NAMES, on_file=on_file):
        name = _NAMES[table.name.lower()]
        digest = hashlib.sha256(table.data).hexdigest()
        if name not in tables:
            tables[name] = (table, digest)
        elif tables[name][1] != digest:
            raise InputError(
                f"differs from {tables[name][0].where}, which has the same table",
                where=table.where,
                hint="keep one of the two",
            )
    if not tables:
        raise InputError(
            "no table of GenTD26 here",
            where=", ".join(map(str, paths)),
            hint="give the directory with pod_gpu_duty_cycle_anon.tar.gz and the other archives, or the CSV files",
        )
    notes: list[str] = []
    metrics = {name: _metric(tables[name][0], notes) for name in METRIC_TABLES if name in tables}
    requests = _requests(tables[REQUESTS][0], notes) if REQUESTS in tables else None
    notes += [
        f"{_published(name)} does not exist: {what} unknown" for name, what in NEEDED_FOR.items() if name not in tables
    ]
    return GenTrace(metrics, requests, {name: table.where for name, (table, _) in tables.items()}, tuple(notes))


def _published(name: str) -> str:
    return f"{METRIC_TABLES[name][0] if name in METRIC_TABLES else name}.csv"


def read_timed_requests(paths: Iterable[Path]) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Return the requests of ``lora_request_trace``, the only ones with times, and notes on dropped rows.

    Columns: ``arrival_s`` (since the first request), ``exec_s``, ``server`` (number of the base model, from 0), in the
    order of arrival. Raises ``InputError`` if the table is missing, damaged, or has no usable row.
    """
    paths = list(paths)
    notes: list[str] = []
    table = next(iter(find_tables(paths, lambda name: name.lower() == TIMED_REQUESTS)), None)
    if table is None:
        raise InputError(f"has no {TIMED_REQUESTS}, the requests with times", where=", ".join(map(str, paths)))
    raw = _read_csv(table, _TIMED_COLUMNS, notes)
    frame = pl.DataFrame(
        {
            "at": raw["gmt_create"].str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False).dt.epoch("s"),
            "exec_s": _number(raw, "exec_time_seconds", table.where),
            "model": raw["checkpoint_model_version_id"].str.strip_chars(),
        }
    )
    usable = frame.filter((pl.col("exec_s") > 0) & ~pl.col("model").is_in(_NO_POD)).drop_nulls()
    # Times are whole seconds: the order of the file does not decide between requests of the same one.
    usable = usable.sort("at", "model", "exec_s")
    if usable.is_empty():
        raise InputError("no request has a time, an execution time and a model", where=table.where)
    if usable.height < frame.height:
        left_out = counted(frame.height - usable.height, "request")
        notes.append(f"{left_out} without a time, an execution time or a model")
    return usable.select(
        (pl.col("at") - pl.col("at").min()).cast(pl.Float64).alias("arrival_s"), "exec_s",
        (pl.col("model").rank("dense") - 1).cast(pl.Int64).alias("server"),
    ), tuple(notes)  # fmt: skip


def load_times_s(paths: Iterable[Path]) -> npt.NDArray[np.float64] | None:
    """Return the measured times to load a base model, s, ascending; ``None``: the table is missing, or empty."""
    names = METRIC_TABLES["load_base_model"]
    table = next(iter(find_tables(list(paths), lambda name: name.lower() in names)), None)
    if table is None:
        return None
    values = _metric(table, [])["value"].drop_nulls().cast(pl.Float64).sort()
    return values.to_numpy() / 1000 if len(values) else None


def _read_csv(table: TraceTable, columns: tuple[str, ...], notes: list[str]) -> pl.DataFrame:
    """Return the columns of the table as text, in the given order. Raises ``InputError`` for any other content."""
    if not table.data.strip():
        raise InputError("the table is empty", where=table.where)
    if not table.data.endswith(b"\n"):
        notes.append(f"{table.name}.csv: the last line has no newline: the table may have been cut")
    header = table.data.split(b"\n", 1)[0].decode("utf-8", "replace").lstrip("\N{BOM}").strip()
    try:
        frame = pl.read_csv(io.BytesIO(table.data), infer_schema=False, encoding="utf8-lossy", raise_if_empty=False)
    except (pl.exceptions.PolarsError, OSError) as error:  # OSError: it is compressed, and cut off
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
    """Return the line of the first row with more fields than the header."""
    rows = csv.reader(io.StringIO(data.decode("utf-8", "replace"), newline=""))
    try:
        width = len(next(rows, []))
        return next((rows.line_num for row in rows if len(row) > width), None)
    except csv.Error:
        return None


def _number(frame: pl.DataFrame, column: str, where: str) -> pl.Series:
    """Convert the column to floats; empty cells are null. Raises ``InputError`` for a cell that is no number."""
    text = frame[column].str.strip_chars()
    values = text.cast(pl.Float64, strict=False)
    bad = (values.is_null() & text.is_not_null() & (text != "")) | values.is_nan() | values.is_infinite()
    if bad.any():
        row = int(bad.fill_null(value=False).arg_max() or 0)
        raise InputError(f"{column} is {text[row]!r}, not a number", where=f"{where}, record {row + 1}")
    return values


def _metric(table: TraceTable, notes: list[str]) -> pl.DataFrame:
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
        notes.append(f"{table.name}.csv: {frame.height - complete.height} rows without a time or a value skipped")
    return complete


def _requests(table: TraceTable, notes: list[str]) -> pl.DataFrame:
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
    """Return the adapter IDs in a cell like ``[{'modelVersionId': 'ab12', 'scale': 1.0}]``, a Python literal."""
    if text is None or not text.strip():
        return []
    try:
        value = ast.literal_eval(text.strip())
        return [str(item["modelVersionId"]) for item in value]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise InputError(f"lora_args is {text[:80]!r}, not a list of {{'modelVersionId': ...}}", where=where) from error
