"""All jobs from one squeue table: the fields that findings need, in a hundredth of the memory of scontrol's JSON.

Each field ends with a random mark that is new for each request. Users cannot know it when they choose job names and
comments, so such text stays one field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.model.cluster import Job
from slurm_affinode.slurm import live_records, scontrol

_REQUESTS = ("tres-per-job", "tres-per-node", "tres-per-socket", "tres-per-task")
FIELDS = (
    "JobID", "ArrayTaskID", "ArrayJobID", "HetJobID", "HetJobOffset", "UserName", "UserID", "Account", "Partition",
    "QOS", "State", "Reason", "PriorityLong", "SubmitTime", "EligibleTime", "StartTime", "EndTime", "TimeLimit",
    "NodeList", "BatchHost", "NumNodes", "NumCPUs", "tres-alloc", "RestartCnt", "BatchFlag", "Requeue", "Feature",
    "Reservation", "ReqNodes", "ExcNodes", *_REQUESTS, "Name", "Comment",
)  # fmt: skip
"""Fields of ``squeue --Format``, in this order. ``tres-alloc`` of a pending job is its request."""


_DIGITS = 20


def argv(mark: str) -> list[str]:
    """Return the command line. It needs ``SLURM_TIME_FORMAT=%s`` in the environment."""
    columns = ",".join(f"{name}:{mark}" for name in FIELDS)
    return ["squeue", "--all", "--local", "--noheader", "--states=all", f"--Format={columns}"]


def jobs(data: bytes, mark: str) -> Iterator[Job]:
    """Yield the jobs. Raises ``UnreachableError`` if the output has another form."""
    width, end, start = len(FIELDS), mark.encode(), 0
    known: dict[Any, Any] = {}
    while start < len(data):
        row: list[str] = []
        for _ in range(width):
            stop = data.find(end, start)
            if stop < 0:
                if not row and not data[start:].strip():
                    return
                raise UnreachableError(
                    "squeue did not return the requested fields",
                    hint="slurm-affinode doctor shows the release of Slurm; 24.11 and newer are supported",
                )
            row.append(data[start:stop].decode("utf-8", "backslashreplace"))
            start = stop + len(end)
        row[0] = row[0].lstrip("\n")
        if _number(row[0].strip()) is not None:
            yield _job([field.strip() for field in row[:-2]], row[-2], row[-1], known)


def _job(row: Sequence[str], name: str, comment: str, known: dict[Any, Any]) -> Job:
    values = dict(zip(FIELDS, row, strict=False))
    task, het = values["ArrayTaskID"], _number(values["HetJobID"])
    array = _number(values["ArrayJobID"]) if task and task != "N/A" else None
    several, _, limit = task.partition("%")
    # Thousands of jobs share these values: parse and store each only once.
    tres = _once(known, ("tres", values["tres-alloc"]), live_records.tres)
    gpus = _once(known, ("gpus", values["tres-alloc"]), lambda text: live_records.gpus(live_records.tres(text)))
    nodes, required, excluded = (
        _once(known, ("nodes", values[key]), live_records.nodes) for key in ("NodeList", "ReqNodes", "ExcNodes")
    )
    partitions = _once(known, ("partitions", values["Partition"]), lambda text: tuple(filter(None, text.split(","))))
    word = {
        key: _once(known, ("word", values[key]), live_records.word) for key in ("UserName", "Account", "QOS", "Reason")
    }
    return live_records.job(
        job_id=int(values["JobID"]),
        array_job_id=array,
        array_task_id=_number(task) if array is not None else None,
        array_tasks=several if array is not None and not task.isdigit() else None,
        array_limit=_number(limit) if array is not None else None,
        het_job_id=het,
        het_offset=None if het is None else _number(values["HetJobOffset"]),
        name=live_records.word(name),
        user=word["UserName"],
        uid=_number(values["UserID"]),
        account=word["Account"],
        partitions=partitions,
        qos=word["QOS"],
        state=_once(known, ("state", values["State"]), str),
        reason=word["Reason"],
        priority=_number(values["PriorityLong"]),
        submit=live_records.moment(_number(values["SubmitTime"])),
        eligible=live_records.moment(_number(values["EligibleTime"])),
        start=_number(values["StartTime"]),
        end=_number(values["EndTime"]),
        time_limit_s=_once(known, ("span", values["TimeLimit"]), scontrol.span_s),
        nodes=nodes,
        batch_host=_once(known, ("word", values["BatchHost"]), live_records.word),
        node_count=_number(values["NumNodes"].partition("-")[0]),
        cpus=_number(values["NumCPUs"].partition("-")[0]),
        requeue=values["Requeue"] == "1",
        restarts=_number(values["RestartCnt"]) or 0,
        tres_requested=tres,
        tres_allocated=tres,
        gpus_requested=gpus,
        gpus_allocated=gpus,
        node_gpus=None,
        features=_once(known, ("word", values["Feature"]), live_records.word),
        reservation=_once(known, ("word", values["Reservation"]), live_records.word),
        comment=live_records.word(comment),
        admin_comment=None,
        stdout=None,
        stderr=None,
        batch=values["BatchFlag"] == "1",
        requests_share=any(_once(known, ("share", values[name]), live_records.requests_share) for name in _REQUESTS),
        nodes_required=required,
        nodes_excluded=excluded,
    )


def _once(known: dict[Any, Any], key: tuple[str, str], make: Any) -> Any:
    if key not in known:
        known[key] = make(key[1])
    return known[key]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None
