"""Recorded GPU allocations of jobs: CSV, JSON lines, or the text of ``scontrol show job --details``.

Fields of CSV and JSON: ``job_id`` (the raw ID), ``node``, ``gpu`` (a UUID, a PCI address, or an index on the node;
several separated by ``;`` or ``,`` or as a JSON list), and optionally ``start`` and ``cluster``.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast
from zoneinfo import ZoneInfo

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import (
    DAMAGED,
    compression,
    document,
    is_binary,
    unpacked,
    utf8_stream,
    whole_lines,
)
from slurm_affinode.base.limits import GPU_LINE_BYTES, excess
from slurm_affinode.slurm import hostlist, times
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, Problem

_HINT = "CSV or JSON lines with job_id, node, gpu[, start, cluster], or the text of: scontrol show job --details"
_ALIASES = {"jobid": "job_id", "job": "job_id", "jobidraw": "job_id", "host": "node", "hostname": "node",
            "nodename": "node", "gpus": "gpu", "uuid": "gpu", "gpu_uuid": "gpu", "start_time": "start"}  # fmt: skip
_UUID = re.compile(r"^(?:GPU|MIG)-[0-9A-Za-z/-]+$")
_BARE_UUID = re.compile(r"^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$", re.IGNORECASE)
_PCI = re.compile(r"^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])$", re.IGNORECASE)
_SHOWN = 60
_HEAD = 64 << 10
_CHUNK = 16 << 20
_DIGITS = 18
"""Maximum number of digits of an ID."""
_JOB = re.compile(r"^JobId=(\d{1,18})\b", re.MULTILINE)
_START = re.compile(r"(?:^|\s)StartTime=(\S+) EndTime=")
_STATE = re.compile(r"(?:^|\s)JobState=(\S+) Reason=")
_NODES = re.compile(r"(?:^|\s)Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GRES = re.compile(r"gpu(?::[^,()]*)?\(IDX:([\d,-]*)\)")


@dataclass(frozen=True, slots=True)
class RecordedAllocations:
    """Result of reading one input."""

    gpus: pl.DataFrame
    """Schema ``ALLOCATION_GPUS``, rows unique."""
    records: int
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def read(
    data: bytes, *, where: str, cluster: str = "default", zone: str = "UTC", strict: bool = False
) -> RecordedAllocations:
    """Read one input in any of the three forms.

    ``zone`` is the IANA zone of times without an offset. Raises ``InputError`` for any other form, and with ``strict``
    at the first bad record.
    """
    rows: list[tuple[str, int, datetime | None, str, str]] = []
    problems: list[Problem] = []
    text = _text(data, where, lambda line, why, _: problems.append(Problem(line, None, None, why)))
    if not text.strip():
        raise InputError("the file is empty", where=where)
    notes: list[str] = []
    records = 0
    if _JOB.search(text.lstrip()[:2000]):
        records = _scontrol(text, rows, problems, notes, cluster=cluster, zone=zone)
    else:
        for line, record in _records(text, where):
            records += 1
            try:
                rows.extend(_rows(record, cluster, zone))
            except ValueError as error:
                job = record.get("job_id")
                problems.append(Problem(line, None if job is None else str(job)[:_SHOWN], None, str(error)))
    if problems and (strict or not rows):
        raise InputError(str(problems[0]), where=f"{where}:{problems[0].line}", hint=_HINT)
    frame = pl.DataFrame(rows, schema=_schema(), orient="row").select(list(ALLOCATION_GPUS)).unique(maintain_order=True)
    return RecordedAllocations(frame, records, tuple(problems), tuple(notes))


def _text(data: bytes, where: str, reject: Callable[[int, str, bytes], None]) -> str:
    """Return the text of a file; unreadable lines are empty in it, and are passed to ``reject``."""
    file, kind = io.BufferedReader(io.BytesIO(data)), compression(data)
    try:
        opened = file if kind is None else io.BufferedReader(cast("io.RawIOBase", unpacked(file, kind, where=where)))
        plain = document(utf8_stream(opened), where=where, packed=kind is not None)
    except (*DAMAGED, OSError) as error:
        raise InputError(f"the compressed file is damaged or cut: {error}", where=where) from error
    if is_binary(plain[:_HEAD]):
        raise InputError("this is a binary file", where=where, hint=_HINT)
    if not plain.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):  # a list is one document
        read = io.BytesIO(plain).read
        plain = b"".join(whole_lines(read, _CHUNK, where=where, longest=GPU_LINE_BYTES, reject=reject))
    return plain.decode("utf-8-sig", "backslashreplace").replace("\r\n", "\n").replace("\r", "\n")


def _schema() -> dict[str, pl.DataType]:
    return {name: ALLOCATION_GPUS[name] for name in ("cluster", "job_id", "start", "node", "gpu")}


def gpu_id(value: object) -> str:
    """Return a GPU's ID as in the database: UUID as given, upper-case PCI address with eight-digit domain, or index.

    Raises ``ValueError``.
    """
    text = str(value).strip()
    if why := excess("uuid", text):
        raise ValueError(f"gpu {why}")
    if _UUID.match(text):
        return text
    if _BARE_UUID.match(text):
        return f"GPU-{text.lower()}"
    if match := _PCI.match(text):
        return f"{(match[1] or '0').zfill(8)}:{match[2]}".upper()
    if text.isdecimal() and len(text) <= 4:
        return str(int(text))
    raise ValueError(f"gpu {text!r} is not a UUID, PCI address or index")


def _records(text: str, where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    first = text.lstrip()[:1]
    if first in ("{", "["):
        yield from _json(text, where)
        return
    header = text.lstrip().partition("\n")[0]
    delimiter = next((mark for mark in (",", "\t", "|", ";") if mark in header), ",")
    reader = csv.DictReader(io.StringIO(text.lstrip()), delimiter=delimiter)
    skipped = text[: len(text) - len(text.lstrip())].count("\n")
    try:
        names = [_name(name) for name in reader.fieldnames or ()]
        missing = [name for name in ("job_id", "node", "gpu") if name not in names]
        if missing:
            raise InputError(f"the header has no {', '.join(missing)}", where=f"{where}:1", hint=_HINT)
        reader.fieldnames = names
        for row in reader:
            yield reader.line_num + skipped, row
    except csv.Error as error:
        raise InputError(f"cannot be read as CSV: {error}", where=f"{where}:{reader.line_num + skipped + 1}") from error


def _json(text: str, where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
            raise InputError(f"this is not JSON: {_reason(error)}", where=f"{where}:{line}", hint=_HINT) from error
        numbered = list(enumerate(values, 1))
    else:
        numbered = []
        for line, content in enumerate(text.split("\n"), 1):
            if content.strip():
                try:
                    numbered.append((line, json.loads(content)))
                except (ValueError, RecursionError) as error:
                    raise InputError(f"not JSON: {_reason(error)}", where=f"{where}:{line}", hint=_HINT) from error
    for line, value in numbered:
        if not isinstance(value, dict):
            raise InputError("not an object", where=f"{where}:{line}", hint=_HINT)
        yield line, {_name(key): content for key, content in value.items()}


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _name(key: str) -> str:
    clean = key.strip().lower()
    return _ALIASES.get(clean, clean)


def _rows(record: Mapping[str, Any], cluster: str, zone: str) -> Iterator[tuple[str, int, datetime | None, str, str]]:
    if record.get(None) is not None:  # type: ignore[call-overload]  # what a row of CSV has beyond its header
        raise ValueError("has more fields than the header (put several GPUs in quotes, or ; between them)")
    for name, field in (("job_id", "job_id"), ("node", "node_list"), ("start", "start"), ("cluster", "cluster")):
        if why := excess(field, str(record.get(name) or "")):
            raise ValueError(f"{name} {why}")
    job = str(record.get("job_id") or "").strip()
    if not job.isdecimal() or len(job) > _DIGITS:
        raise ValueError(f"job_id {job!r} is not the raw ID of a job (a number)")
    node = str(record.get("node") or "").strip()
    if not node:
        raise ValueError("has no node")
    gpus = record.get("gpu")
    values = gpus if isinstance(gpus, list) else re.split(r"[;,\s]+", str(gpus if gpus is not None else "").strip())
    named = [gpu_id(value) for value in values if str(value).strip()]
    if not named:
        raise ValueError("has no gpu")
    start = _start(record.get("start"), zone)
    name = str(record.get("cluster") or "").strip() or cluster
    for host in hostlist.expand(node):
        for gpu in named:
            yield name, int(job), start, host.partition(".")[0], gpu


def _start(value: Any, zone: str) -> datetime | None:
    if value is None:
        return None
    try:
        moment = times.parse(str(int(value)) if isinstance(value, int | float) else str(value))
    except OverflowError:
        raise ValueError(f"{value!r} is not a time") from None
    if moment is None or moment.tzinfo is not None:
        return moment
    return times.readings(moment, ZoneInfo(zone))[0].astimezone(UTC)


def _scontrol(
    text: str,
    rows: list[tuple[str, int, datetime | None, str, str]],
    problems: list[Problem],
    notes: list[str],
    *,
    cluster: str,
    zone: str,
) -> int:
    """Parse jobs as scontrol prints them, on several lines or one. It shows GPU indices only of running jobs."""
    matches = list(_JOB.finditer(text))
    unindexed = 0
    for match, following in zip(matches, [*matches[1:], None], strict=True):
        block = text[match.start() : following.start() if following is not None else len(text)]
        line = text.count("\n", 0, match.start()) + 1
        try:
            gpu_rows, indexed = _scontrol_job(block, int(match[1]), cluster, zone)
        except ValueError as error:
            problems.append(Problem(line, match[1], None, str(error)))
            continue
        rows.extend(gpu_rows)
        unindexed += not indexed
    if unindexed:
        notes.append(f"{unindexed:,} jobs with GPUs without their indexes: scontrol shows them for running jobs only")
    return len(matches)


def _scontrol_job(
    block: str, job: int, cluster: str, zone: str
) -> tuple[list[tuple[str, int, datetime | None, str, str]], bool]:
    state = _STATE.search(block)
    if state is not None and state[1] == "PENDING":
        return [], True
    began = _START.search(block)
    start = _start(began[1], zone) if began is not None else None
    rows = [
        (cluster, job, start, host, str(index))
        for nodes, gres in _NODES.findall(block)
        for indexes in _GRES.findall(gres)
        for index in _indexes(indexes)
        for host in hostlist.expand(nodes)
    ]
    return rows, bool(rows) or "JOB_GRES=gpu" not in block


def _indexes(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or first) > 4096:
            raise ValueError(f"IDX {text!r} is not a list of indexes")
        yield from range(int(first), int(last or first) + 1)
