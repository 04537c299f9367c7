"""The numbers of the GPUs of every job, from one ``scontrol --oneliner --details show jobs``.

Names of jobs and comments stand in that text as their owners chose them, line breaks included: whoever wants to may
write what looks like a record. So it is read for nothing but the numbers, and these count only where the text has one
record of a job and where nodes and amounts in it are those that are known of the job from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from slurm_affinode.model.cluster import Job, NodeGpus
from slurm_affinode.slurm import live

ARGV = ("scontrol", "--all", "--oneliner", "--details", "show", "jobs")
_RECORD = re.compile(rb"^JobId=(\d+) ", re.MULTILINE)
_BLOCK = re.compile(rb" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")


def needed(jobs: Iterable[Job]) -> list[Job]:
    """Those that hold GPUs."""
    return [job for job in jobs if job.allocated and job.gpus_allocated is not None and job.gpus_allocated.count]


def node_gpus(data: bytes, jobs: Iterable[Job]) -> dict[int, tuple[NodeGpus, ...]]:
    """Raw id -> GPUs by node, of those of ``jobs`` about which the text leaves no doubt."""
    wanted = {job.job_id: job for job in needed(jobs)}
    found: dict[int, tuple[NodeGpus, ...]] = {}
    doubtful: set[int] = set()
    starts = _RECORD.finditer(data)
    here = next(starts, None)
    while here is not None:
        following = next(starts, None)
        number, end = int(here[1]), len(data) if following is None else following.start()
        job = wanted.get(number)
        if job is not None:
            told = _told(data, here.end(), end)
            if number in found or number in doubtful or not _agrees(job, told):
                doubtful.add(number)
                found.pop(number, None)
            else:
                found[number] = told
        here = following
    return found


def _told(data: bytes, start: int, end: int) -> tuple[NodeGpus, ...]:
    rows: list[NodeGpus] = []
    for match in _BLOCK.finditer(data, start, end):
        names = live.nodes(match[1].decode("ascii", "replace"))
        rows += live.node_gpus(names, [match[2].decode("utf-8", "replace")] * len(names))
    return tuple(rows)


def _agrees(job: Job, told: tuple[NodeGpus, ...]) -> bool:
    seen: Mapping[tuple[str, str | None], NodeGpus] = {(one.node, one.kind): one for one in told}
    if len(seen) != len(told) or {one.node for one in told} - set(job.nodes):
        return False
    whole = 0 if job.gpus_allocated is None else job.gpus_allocated.count
    return sum(one.count for one in told) == whole and all(len(one.indices) in (0, one.count) for one in told)
