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
        number = _number(row[0].strip())
        if number is not None:
            yield _job(number, row, parse, node_gpus)


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
        self.number = cache(lambda text: _number(text.strip()))
        self.least = cache(lambda text: _number(text.strip().partition("-")[0]))
        self.word = cache(lambda text: live_records.word(text.strip()))
        self.text = cache(live_records.word)
        self.flag = cache(lambda text: text.strip() == "1")
        self.state = cache(lambda text: sys.intern(text.strip()))
        self.moment = cache(lambda text: live_records.moment(_number(text.strip())))
        self.nodes = cache(lambda text: live_records.nodes(text.strip()))
        self.span_s = cache(lambda text: scontrol.span_s(text.strip()))
        self.tres = cache(lambda text: live_records.tres(text.strip()))
        self.gpus = cache(lambda text: live_records.gpus(self.tres(text)))
        self.partitions = cache(lambda text: tuple(filter(None, text.strip().split(","))))
        self.requests_share = cache(lambda *texts: live_records.requests_share(*map(str.strip, texts)))


def _job(job_id: int, row: Sequence[str], parse: _Parsers, node_gpus: NodeGpusOf) -> Job:
    (
        _, array_task, array_job, het_job, het_offset, user, uid, account, partition, qos, state_, reason, priority,
        submit, eligible, start, end, time_limit, node_list, batch_host, node_count, cpus, tres_alloc, restarts, batch,
        requeue, features, reservation, nodes_required, nodes_excluded, *requests, name, comment,
    ) = row  # fmt: skip
    number, word, nodes, moment = parse.number, parse.word, parse.nodes, parse.moment
    task, het = array_task.strip(), number(het_job)
    array = number(array_job) if task and task != "N/A" else None
    several, _, limit = task.partition("%")
    tres, gpus = parse.tres(tres_alloc), parse.gpus(tres_alloc)
    state, allocated = parse.state(state_), nodes(node_list)
    return live_records.job(
        job_id=job_id,
        array_job_id=array,
        array_task_id=number(task) if array is not None else None,
        array_tasks=several if array is not None and not task.isdigit() else None,
        array_limit=_number(limit) if array is not None else None,
        het_job_id=het,
        het_offset=None if het is None else number(het_offset),
        name=parse.text(name),
        user=word(user),
        uid=number(uid),
        account=word(account),
        partitions=parse.partitions(partition),
        qos=word(qos),
        state=state,
        reason=word(reason),
        priority=number(priority),
        submit=moment(submit),
        eligible=moment(eligible),
        start=moment(start),
        end=moment(end),
        time_limit_s=parse.span_s(time_limit),
        nodes=allocated,
        batch_host=word(batch_host),
        node_count=parse.least(node_count),
        cpus=parse.least(cpus),
        requeue=parse.flag(requeue),
        restarts=number(restarts) or 0,
        tres_requested=tres,
        tres_allocated=tres,
        gpus_requested=gpus,
        gpus_allocated=gpus,
        node_gpus=node_gpus(job_id, state, allocated, gpus),
        features=word(features),
        reservation=word(reservation),
        comment=parse.text(comment),
        admin_comment=None,
        stdout=None,
        stderr=None,
        batch=parse.flag(batch),
        requests_share=parse.requests_share(*requests),
        nodes_required=nodes(nodes_required),
        nodes_excluded=nodes(nodes_excluded),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None
