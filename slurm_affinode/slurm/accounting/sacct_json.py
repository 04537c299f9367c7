"""Conversion of ``sacct --json`` (data parsers v0.0.38 to v0.0.42 and later) to typed records.

The helpers below handle differences between releases: a number is ``5`` or ``{"set": true, "infinite":
false, "number": 5}``; a state is ``"COMPLETED"`` or ``["COMPLETED"]``; a step ID is a string or an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.garbage import without_collection
from slurm_affinode.base.limits import NAME_BYTES, excess
from slurm_affinode.base.text import one_line
from slurm_affinode.slurm import hostlist, identifiers, units
from slurm_affinode.slurm.accounting import records
from slurm_affinode.slurm.accounting.records import RECORDS, settle
from slurm_affinode.slurm.accounting.schema import Problem

_BAD = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""Exceptions that damaged values cause below."""

_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)", re.DOTALL)
"""An escape in a JSON string; the group is a lone surrogate, which is not a character."""

_SHOWN = 200
_SHORT = NAME_BYTES // 4
"""Characters that fit every field of ``RECORDS``: one has at most 4 bytes of UTF-8."""
_UNSET_32 = 0xFFFFFFFE
"""NO_VAL and INFINITE of 32 bits begin here."""
_TRES_FIELDS = {"alloc": "tres.allocated", "req": "tres.requested"}
_HINT = "make the input with: sacct --json --allusers --duplicates"


@without_collection()
def read(data: bytes, *, where: str, cluster: str = "default") -> tuple[pl.DataFrame, list[Problem], list[str]]:
    """Return the records (schema ``RECORDS``), problems and notes of a JSON document. Its times are UTC epoch seconds.

    Raises ``InputError`` if the document is not output of ``sacct --json``.
    """
    notes: list[str] = []
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "backslashreplace").replace("\\x", "\\\\x")
        notes.append("some bytes are not UTF-8 and are shown as \\xNN")
    jobs, errors = _jobs(text, where)
    notes += [f"sacct reported an error, so jobs may be missing: {error}" for error in dict.fromkeys(errors)]
    rows: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for number, job in enumerate(jobs, 1):
        try:
            record = _job(job, number, cluster)
            problems += _field_problems(record, number)
        except _BAD as error:
            printed = str(job.get("job_id"))[:_SHOWN] if isinstance(job, dict) and "job_id" in job else None
            problems.append(Problem(number, printed, None, _error_text(error)))
            continue
        rows.append(record)
        for step in _list(job.get("steps")):
            try:
                row = _step(step, record)
                problems += _field_problems(row, number)
                rows.append(row)
            except _BAD as error:
                problems.append(Problem(number, record["printed"], "steps", _error_text(error)))
    return settle(pl.DataFrame(rows, schema=RECORDS, orient="row")), problems, notes


def _field_problems(record: dict[str, Any], number: int) -> list[Problem]:
    """Return the problems with single fields of ``record``, and set these to unknown. Raises ``ValueError``."""
    faults = [(field, record.pop(f"{kind}_bad", None)) for kind, field in _TRES_FIELDS.items()]
    texts: list[tuple[str, str]] = []
    for name, value in record.items():
        if isinstance(value, str):
            if len(value) > _SHORT:
                texts.append((name, value))
        elif isinstance(value, int) and abs(value) >= 1 << 63:
            raise ValueError(f"{name} {value} is too large a number")
    for name, value in texts:
        if why := excess(name, value):
            if name in ("cluster", "printed", "step_id"):
                raise ValueError(f"{name} {why}")
            record[name] = None
            faults.append((name, why))
    return [
        Problem(number, record["printed"], field, f"{why}, so it is unknown", dropped=False)
        for field, why in faults
        if why
    ]


def _error_text(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"has no {error.args[0]!r}"
    text = str(error)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _jobs(text: str, where: str) -> tuple[list[Any], list[str]]:
    """Return the jobs, and the errors reported by sacct."""
    if "\\ud" in text or "\\uD" in text:
        text = _ESCAPE.sub(lambda escape: f"\\\\{escape[1]}" if escape[1] else escape[0], text)
    try:
        document = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
        what = "the JSON ends early: the file was cut" if cut else f"this is not JSON: {error.msg}"
        raise InputError(what, where=f"{where}:{error.lineno}", hint=_HINT) from error
    except (ValueError, RecursionError):
        what = "JSON nested too deeply, or a number of thousands of digits"
        raise InputError(f"this is not sacct output: {what}", where=where) from None
    jobs = document.get("jobs") if isinstance(document, dict) else None
    errors = [_message(error) for error in _list(document.get("errors"))] if isinstance(document, dict) else []
    if errors and not jobs:
        raise InputError(f"sacct failed: {errors[0]}", where=where, hint="create the input again when sacct responds")
    if not isinstance(jobs, list):
        raise InputError("this JSON is not sacct output: it has no list 'jobs'", where=where, hint=_HINT)
    first = next((job for job in jobs if isinstance(job, dict)), None)
    if first is not None and "time" not in first and "job_state" in first:
        raise InputError("this is the JSON of squeue or scontrol, not of sacct", where=where, hint=_HINT)
    if jobs and first is None:
        raise InputError("this JSON is not sacct output: 'jobs' holds no objects", where=where, hint=_HINT)
    return jobs, errors


def _message(error: Any) -> str:
    """Return one entry of ``errors`` as one line."""
    body = error if isinstance(error, dict) else {"error": error}
    parts = [str(body[key]) for key in ("description", "error") if body.get(key)]
    return one_line(": ".join(parts), _SHOWN) or "an error without a word"


def _job(job: Any, number: int, cluster: str) -> dict[str, Any]:
    job_id = _object(job)["job_id"]
    if not isinstance(job_id, int) or isinstance(job_id, bool) or not 0 <= job_id <= identifiers.MAX:
        raise ValueError(f"job_id {job_id!r} is not a job ID")
    time = _object(job["time"])
    association = _object(job.get("association"))
    comment = job.get("comment")
    comments = comment if isinstance(comment, dict) else {"job": comment}
    required = _object(job.get("required"))
    state = _object(job.get("state"))
    limit = time.get("limit")
    limit_s = _number(limit)
    tres = _object(job.get("tres"))
    nodes = _text(job.get("nodes"))
    node_list = None if nodes is None or hostlist.is_none(nodes) else nodes
    record = {
        "line": number,
        "cluster": _text(job.get("cluster")) or _text(association.get("cluster")) or cluster,
        "job_id": job_id,
        **_identity(job, job_id),
        "job_name": _text(job.get("name")),
        "user": _text(job.get("user")) or _text(association.get("user")),
        "account": _text(job.get("account")) or _text(association.get("account")),
        "partition": _text(job.get("partition")),
        "qos": _text(job.get("qos")),
        "priority": _whole(job.get("priority")),
        **_state(state.get("current"), job),
        **_exit(job.get("exit_code")),
        "reason": _reason(state.get("reason")),
        "submit": _time(time.get("submission")),
        "eligible": _time(time.get("eligible")),
        "start": _time(time.get("start")),
        "end": _time(time.get("end")),
        "elapsed_s": _whole(time.get("elapsed")),
        "suspended_s": _whole(time.get("suspended")),
        "time_doubt_s": 0,
        "timelimit_s": None if limit_s is None else round(limit_s * 60),
        "timelimit_unlimited": True if _infinite(limit) else (False if limit_s is not None else None),
        "node_list": node_list,
        **_tres(tres.get("allocated"), "alloc"),
        **_tres(tres.get("requested"), "req"),
        "total_cpu_s": _cpu_seconds(time.get("total")),
        "comment": _text(comments.get("job")),
        "admin_comment": _text(comments.get("administrator")),
        "constraints": _text(job.get("constraints")),
        "work_dir": _text(job.get("working_directory")),
        "submit_line": _text(job.get("submit_line")),
    }
    if record["end"] is not None and record["start"] is not None and record["end"] < record["start"]:
        raise ValueError("End is before Start")
    record["nodes"] = record["nodes"] or _whole(job.get("allocation_nodes")) or None
    if record["req_mem_bytes"] is None:
        record["req_mem_bytes"] = _required_memory(required, record)
    return record


def _identity(job: Mapping[str, Any], job_id: int) -> dict[str, Any]:
    array = _object(job.get("array"))
    het = _object(job.get("het"))
    array_id = _whole(array.get("job_id")) or None
    task = _whole(array.get("task_id"))
    spec = _text(array.get("task"))
    leader = _whole(het.get("job_id")) or None
    if array_id is None:
        task = spec = None
    if spec is not None and spec.isdigit() and task is None:
        task = int(spec)
    spec = None if task is not None else _array_spec(spec, array)
    offset = _whole(het.get("job_offset")) if leader is not None else None
    printed = str(job_id)
    if task is not None:
        printed = f"{array_id}_{task}"
    elif spec is not None:
        printed = f"{array_id}_[{spec}]"
    elif leader is not None:
        printed = f"{leader}+{offset or 0}"
    return {
        "printed": printed,
        "array_job_id": array_id,
        "array_task_id": task,
        "array_spec": spec,
        "het_job_id": leader,
        "het_offset": offset,
    }


def _array_spec(text: str | None, array: Mapping[str, Any]) -> str | None:
    """Return the pending tasks as in sacct's text: JSON may have a bit mask (``0x92492``) and a separate limit."""
    if text is not None and (why := excess("array_spec", text)):
        raise ValueError(f"array_spec {why}")
    if text is None or not re.fullmatch(r"0x[0-9A-Fa-f]+", text):
        return text
    mask = int(text, 16)
    tasks = (str(bit) for bit in range(mask.bit_length()) if mask >> bit & 1)
    running = _object(_object(_object(array.get("limits")).get("max")).get("running"))
    limit = _whole(running.get("tasks"))
    return hostlist.compress_numbers(tasks) + (f"%{limit}" if limit else "")


def _step(step: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    body = _object(step)
    named = _object(body["step"])
    time = _object(body.get("time"))
    nodes = _object(body.get("nodes"))
    tres = _object(body.get("tres"))
    requested = _object(tres.get("requested"))
    high = {_tres_name(entry): _number(entry.get("count")) for entry in _entries(requested.get("max"))}
    rss = high.get("mem")
    node_list = _text(nodes.get("range"))
    energy = _object(_object(body.get("statistics")).get("energy")).get("consumed")
    return {
        "line": job["line"],
        "printed": job["printed"],
        "cluster": job["cluster"],
        "job_id": job["job_id"],
        "step_id": _step_id(named.get("id")),
        # JSON nests steps in their job, so a step belongs to that run whatever the order.
        "submit": job["submit"],
        "job_name": _text(named.get("name")),
        **_state(body.get("state"), body),
        **_exit(body.get("exit_code")),
        "start": _time(time.get("start")),
        "end": _time(time.get("end")),
        "elapsed_s": _whole(time.get("elapsed")),
        "suspended_s": _whole(time.get("suspended")),
        "node_list": None if node_list is None or hostlist.is_none(node_list) else node_list,
        "tasks": _whole(_object(body.get("tasks")).get("count")),
        **_tres(tres.get("allocated"), "alloc"),
        "total_cpu_s": _cpu_seconds(time.get("total")),
        "max_rss_bytes": None if rss is None else int(rss),
        "gpu_util_max_pct": high.get("gres/gpuutil"),
        "gpu_mem_max_bytes": _whole(high.get("gres/gpumem")),
        "energy_j": _number(energy) or None,
        "submit_line": _text(body.get("submit_line")),
    }


def _step_id(value: Any) -> str:
    if isinstance(value, dict):
        number_or_name = value.get("step_id")
        number = None if isinstance(number_or_name, str) else _number(number_or_name)
        text = str(number_or_name or "") if number is None else str(int(number))
        het = _number(value.get("step_het_component"))
        text = f"{text}+{int(het)}" if het is not None else text
    else:
        text = str(value).partition(".")[2] if "." in str(value) else str(value)
    text = text.lower() if text.isupper() else text
    if text in ("", "None", "none"):
        raise ValueError(f"a step has no id: {value!r}")
    return identifiers.SPECIAL_STEPS.get(text, text)


def _state(current: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    words = [str(word) for word in current] if isinstance(current, list) else [str(current)] if current else []
    # The base state comes first, then flags: ["CANCELLED", "COMPLETING"]; but ["PENDING", "REQUEUED"] is a run that
    # ended when its job was requeued.
    ended = next((word for word in words[1:] if word in ("REQUEUED", "RESIZING")), None)
    state, by = records.parse(ended or words[0]) if words else (None, None)
    killer = _text(body.get("kill_request_user"))
    if state == "CANCELLED" and by is None:
        by = killer
    return {"state": state, "cancelled_by": by}


def _reason(value: Any) -> str | None:
    return ",".join(str(word) for word in value) if isinstance(value, list) else _text(value)


def _exit(value: Any) -> dict[str, Any]:
    body = _object(value)
    signal = _object(body.get("signal"))
    number = _whole(signal.get("id", signal.get("signal_id")))
    code = _whole(body.get("return_code"))
    # Only one of the two is set; sacct's text has 0 for the other.
    if number is not None or code is not None:
        number, code = number or 0, code or 0
    return {"exit_code": code, "exit_signal": number}


def _tres(value: Any, kind: str) -> Mapping[str, Any]:
    return _amounts(tuple((_tres_name(entry), _number(entry.get("count"))) for entry in _entries(value)), kind)


@lru_cache(maxsize=4096)  # thousands of records have the same amounts
def _amounts(counts: tuple[tuple[str, float | None], ...], kind: str) -> Mapping[str, Any]:
    amounts = {name: int(n) if n == int(n) else n for name, n in dict(counts).items() if n is not None}
    cpus, nodes, memory = (None if name not in amounts else int(amounts[name]) for name in ("cpu", "node", "mem"))
    gpus, bad = units.GpuCounts(None), None
    try:
        gpus = units.gpus_of_tres({name: str(count) for name, count in amounts.items()})
    except ValueError as error:
        bad = str(error)
    memory_bytes = None if memory is None else memory << 20
    text = units.format_tres({n: f"{c}M" if n == "mem" else c for n, c in amounts.items()}) or None
    if kind == "req":
        return {"req_tres": text, "req_gpus": gpus.count, "req_mem_bytes": memory_bytes, "req_bad": bad}
    return {
        "alloc_tres": text,
        "gpus": gpus.count,
        "gpu_type": gpus.kind,
        "gpus_said": text is not None and bad is None,
        "alloc_bad": bad,
        "alloc_mem_bytes": memory_bytes,
        "cpus": cpus,
        "nodes": nodes,
    }


def _tres_name(entry: Mapping[str, Any]) -> str:
    name = entry.get("name")
    return f"{entry['type']}/{name}" if name else str(entry["type"])


def _required_memory(required: Mapping[str, Any], record: Mapping[str, Any]) -> int | None:
    cpus, nodes = _whole(required.get("CPUs")), record["nodes"]
    for name, factor in (("memory_per_cpu", cpus), ("memory_per_node", nodes)):
        size = _whole(required.get(name))
        if size and factor:
            return (size << 20) * factor
    size = _whole(required.get("memory"))
    return size << 20 if size is not None and 0 < size < 1 << 40 else None


def _cpu_seconds(value: Any) -> float | None:
    body = _object(value)
    seconds, micro = _number(body.get("seconds")), _number(body.get("microseconds"))
    return None if seconds is None else seconds + (micro or 0.0) / 1e6


def _time(value: Any) -> datetime | None:
    number = _number(value)
    if number is None or number <= 0:
        return None
    if number >= 1 << 34:
        raise ValueError(f"{value!r} is not a time")
    return datetime.fromtimestamp(int(number), UTC)


def _infinite(value: Any) -> bool:
    return isinstance(value, dict) and value.get("infinite") is True


def _number(value: Any) -> float | None:
    """Return a number, plain or ``{set, infinite, number}``; Slurm's "not set" values are ``None``."""
    if isinstance(value, dict):
        if value.get("set") is False or value.get("infinite") is True:
            return None
        value = value.get("number")
    if type(value) is int and 0 <= value < _UNSET_32:
        return float(value)  # nearly all numbers
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = float(value) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    if value > 1 << 64:  # larger than any value of Slurm's, including "not set"
        raise ValueError("a number in it is too large")
    # NO_VAL and INFINITE of 32 and 64 bits, which some fields print unchanged, or as -2 and -1.
    return None if value < 0 or value in (_UNSET_32, _UNSET_32 + 1) or value >= units.NO_VALUE else float(value)


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        value = ",".join(str(part) for part in value)
    return value if isinstance(value, str) and value else None


def _object(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    return value


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _entries(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in _list(value) if isinstance(entry, dict) and entry.get("type")]
