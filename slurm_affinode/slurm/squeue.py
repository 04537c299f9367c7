"""All jobs from one squeue table: the fields that findings need, in a hundredth of the memory of scontrol's JSON.

Each field ends with a random mark that is new for each request. Users cannot know it when they choose job names and
comments, so such text stays one field.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.model.cluster import GpuCount, Job, NodeGpus
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
_PART_BYTES = 1 << 20


def argv(mark: str) -> list[str]:
    """Return the command line. It needs ``SLURM_TIME_FORMAT=%s`` in the environment."""
    columns = ",".join(f"{name}:{mark}" for name in FIELDS)
    return ["squeue", "--all", "--local", "--noheader", "--states=all", f"--Format={columns}"]


NodeGpusOf = Callable[[int, str, tuple[str, ...], GpuCount | None], tuple[NodeGpus, ...] | None]
"""Raw ID, state, nodes and GPUs of a job -> its GPUs per node; ``None``: unknown."""


def jobs(data: bytes, mark: str, node_gpus: NodeGpusOf = lambda *_: None) -> Iterator[Job]:
    """Yield the jobs. Raises ``UnreachableError`` if the output has another form."""
    parse = _Parsers()
    for row in _rows(data, mark):
        row[0] = row[0].lstrip("\n")
        if _number(row[0].strip()) is not None:
            yield _job(row, parse, node_gpus)


def _rows(data: bytes, mark: str) -> Iterator[list[str]]:
    """Yield the fields of each row. Only a part of the output is decoded at a time, to save memory."""
    width, end, start = len(FIELDS), mark.encode(), 0
    fields: list[str] = []
    rest = ""
    while start < len(data):
        stop = data.find(end, start + _PART_BYTES)
        fields += data[start : stop if stop >= 0 else None].decode("utf-8", "backslashreplace").split(mark)
        if stop < 0:
            rest, stop = fields.pop(), len(data)
        whole = len(fields) // width * width
        for first in range(0, whole, width):
            yield fields[first : first + width]
        del fields[:whole]
        start = stop + len(end)
    if fields or rest.strip():
        raise UnreachableError(
            "squeue did not return the requested fields",
            hint="slurm-affinode doctor shows the release of Slurm; 24.11 and newer are supported",
        )


class _Parsers:
    """Parsers that parse and store each text once, because thousands of jobs share most of their values."""

    def __init__(self) -> None:
        self.number = cache(_number)
        self.word = cache(live_records.word)
        self.nodes = cache(live_records.nodes)
        self.span_s = cache(scontrol.span_s)
        self.tres = cache(live_records.tres)
        self.gpus = cache(lambda text: live_records.gpus(live_records.tres(text)))
        self.partitions = cache(lambda text: tuple(filter(None, text.split(","))))
        self.requests_share = cache(live_records.requests_share)


def _job(row: Sequence[str], parse: _Parsers, node_gpus: NodeGpusOf) -> Job:
    values = dict(zip(FIELDS, map(str.strip, row), strict=True))
    number, word, nodes = parse.number, parse.word, parse.nodes
    task, het = values["ArrayTaskID"], number(values["HetJobID"])
    array = number(values["ArrayJobID"]) if task and task != "N/A" else None
    several, _, limit = task.partition("%")
    tres, gpus = parse.tres(values["tres-alloc"]), parse.gpus(values["tres-alloc"])
    name, comment = row[-2:]  # users' texts, as they are
    job_id, state, allocated = int(values["JobID"]), sys.intern(values["State"]), nodes(values["NodeList"])
    return live_records.job(
        job_id=job_id,
        array_job_id=array,
        array_task_id=number(task) if array is not None else None,
        array_tasks=several if array is not None and not task.isdigit() else None,
        array_limit=number(limit) if array is not None else None,
        het_job_id=het,
        het_offset=None if het is None else number(values["HetJobOffset"]),
        name=word(name),
        user=word(values["UserName"]),
        uid=number(values["UserID"]),
        account=word(values["Account"]),
        partitions=parse.partitions(values["Partition"]),
        qos=word(values["QOS"]),
        state=state,
        reason=word(values["Reason"]),
        priority=number(values["PriorityLong"]),
        submit=live_records.moment(_number(values["SubmitTime"])),
        eligible=live_records.moment(_number(values["EligibleTime"])),
        start=_number(values["StartTime"]),
        end=_number(values["EndTime"]),
        time_limit_s=parse.span_s(values["TimeLimit"]),
        nodes=allocated,
        batch_host=word(values["BatchHost"]),
        node_count=number(values["NumNodes"].partition("-")[0]),
        cpus=number(values["NumCPUs"].partition("-")[0]),
        requeue=values["Requeue"] == "1",
        restarts=number(values["RestartCnt"]) or 0,
        tres_requested=tres,
        tres_allocated=tres,
        gpus_requested=gpus,
        gpus_allocated=gpus,
        node_gpus=node_gpus(job_id, state, allocated, gpus),
        features=word(values["Feature"]),
        reservation=word(values["Reservation"]),
        comment=word(comment),
        admin_comment=None,
        stdout=None,
        stderr=None,
        batch=values["BatchFlag"] == "1",
        requests_share=any(parse.requests_share(values[request]) for request in _REQUESTS),
        nodes_required=nodes(values["ReqNodes"]),
        nodes_excluded=nodes(values["ExcNodes"]),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None
