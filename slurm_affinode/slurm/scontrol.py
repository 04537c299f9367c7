"""Output of ``scontrol show``: jobs, steps and nodes from JSON, GPU numbers and configuration from text.

The data parser is named (``--json=v0.0.42``): the newest one of ``PARSERS`` that this Slurm has, as each release drops
the oldest. They give the same keys; a number is ``{set, infinite, number}``.

The text of ``scontrol --oneliner --details show jobs`` contains job names and comments chosen by users, line breaks
included, so anyone can imitate a record. It is read only for GPU numbers, and only where it has exactly one record of a
job whose nodes and amounts equal those known from elsewhere.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.garbage import without_collection
from slurm_affinode.model.cluster import GpuCount, Job, Node, NodeGpus, Partition, Step
from slurm_affinode.slurm import identifiers, live_records, units

ARGV = ("scontrol", "--all", "--oneliner", "--details", "show", "jobs")
_RECORD = re.compile(rb"JobId=(\d{1,20}) ")
_RECORD_BEGIN = b"\nJobId="
_REQUESTS = ("job", "node", "socket", "task")
_BLOCK_BEGIN = b" Nodes="
_BLOCK = re.compile(rb" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")


class Details:
    """The output of ``ARGV``, as a source of GPU numbers."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._nodes = cache(lambda names: live_records.nodes(names.decode("ascii", "replace")))
        self._records: dict[int, tuple[int, int] | None] = {}
        """Raw ID -> begin and end of its record; ``None`` if there are several."""
        starts = list(_starts(data))
        for (number, begin), (_, end) in itertools.pairwise((*starts, (0, len(data)))):
            self._records[number] = None if number in self._records else (begin, end)

    def node_gpus(self, job_id: int, nodes: Collection[str], allocated: GpuCount) -> tuple[NodeGpus, ...] | None:
        """Return the GPUs of a job per node; ``None`` if its record is missing or ambiguous."""
        record = self._records.get(job_id)
        if record is None:
            return None
        reported = self._reported(*record)
        return reported if _agrees(reported, nodes, allocated) else None

    def _reported(self, begin: int, end: int) -> tuple[NodeGpus, ...]:
        rows: list[NodeGpus] = []
        position = self._data.find(_BLOCK_BEGIN, begin, end)
        while position >= 0:
            match = _BLOCK.match(self._data, position, end)
            if match is not None:
                names = self._nodes(match[1])
                rows += live_records.node_gpus(names, [match[2].decode("utf-8", "replace")] * len(names))
            position = self._data.find(_BLOCK_BEGIN, position + 1 if match is None else match.end(), end)
        return tuple(rows)


def _starts(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the raw ID of each record, and the position after it."""
    line = 0  # searching for fixed text is many times as fast as a pattern
    while line >= 0:
        match = _RECORD.match(data, line + (line > 0))
        if match is not None:
            yield int(match[1]), match.end()
        line = data.find(_RECORD_BEGIN, line + (line > 0))


def _agrees(reported: tuple[NodeGpus, ...], nodes: Collection[str], allocated: GpuCount) -> bool:
    count, kinds = 0, set()
    for node_gpus in reported:
        kinds.add((node_gpus.node, node_gpus.kind))
        if node_gpus.node not in nodes or len(node_gpus.indices) not in (0, node_gpus.count):
            return False
        count += node_gpus.count
    return count == allocated.count and len(kinds) == len(reported)


PARSERS = ("v0.0.45", "v0.0.44", "v0.0.43", "v0.0.42")
"""Data parsers whose output is understood, the newest first: those of Slurm 24.11 to 26.05."""
LIST_PARSERS = ("scontrol", "--json=list", "ping")
_DIGITS = 20


def parser(listing: bytes) -> str:
    """Return the newest of ``PARSERS`` in the output of ``LIST_PARSERS``.

    Raises ``UnreachableError`` if there is none: this Slurm is older or newer than those that are supported, or lacks
    the plugins.
    """
    plugins = {line.strip().rpartition("/")[2] for line in listing.decode("utf-8", "replace").splitlines()}
    newest = next((name for name in PARSERS if name in plugins), None)
    if newest is None:
        names = sorted(name for name in plugins if re.fullmatch(r"v[\d.]+", name))
        raise UnreachableError(
            f"scontrol has no data parser of {PARSERS[-1]} to {PARSERS[0]} (it has {', '.join(names) or 'none'})",
            hint="it needs Slurm's plugins serializer/json and data_parser (Debian: slurm-wlm-basic-plugins); for a "
            "newer Slurm, update slurm-affinode",
        )
    return newest


@without_collection()
def document(data: bytes, key: str) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the records below ``key``, and whether slurmctld has responded.

    scontrol writes an empty list and exits with 0 also if slurmctld is down or has no job with that ID; the only sign
    is the time of the last update, which is then 0. Raises ``UnreachableError`` if the output is not JSON with ``key``.
    """
    text = data.decode("utf-8", "backslashreplace").replace("\\x", "\\\\x") if not _is_utf8(data) else data.decode()
    try:
        parsed = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        parsed = None
    records = parsed.get(key) if isinstance(parsed, dict) else None
    if not isinstance(records, list):
        raise UnreachableError(
            "scontrol --json returned no JSON",
            hint="it needs Slurm's plugins serializer/json and data_parser (Debian: slurm-wlm-basic-plugins)",
        )
    updated = parsed.get("last_update") if isinstance(parsed, dict) else None
    answered = bool(records) or updated is None or _number(updated) != 0
    return [record for record in records if isinstance(record, dict)], answered


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@without_collection()
def jobs(records: Iterable[Mapping[str, Any]]) -> tuple[Job, ...]:
    """Return the jobs; records without a usable ID are skipped."""
    return tuple(_job(record) for record in records if isinstance(record.get("job_id"), int))


def steps(records: Iterable[Mapping[str, Any]]) -> tuple[Step, ...]:
    """Return the steps; records without a usable ID are skipped."""
    return tuple(step for record in records if (step := _step(record)) is not None)


@without_collection()
def nodes(records: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Return the nodes; records without a name are skipped."""
    return tuple(_node(record) for record in records if live_records.word(record.get("name")))


def _job(job: Mapping[str, Any]) -> Job:
    array_id = _number(job.get("array_job_id")) or None
    het_id = _number(job.get("het_job_id")) or None
    tasks = live_records.word(job.get("array_task_string"))
    # Tasks without a record of their own have no output yet: the path that Slurm shows has an invalid task number.
    waiting = array_id is not None and tasks is not None
    limit = _number(job.get("time_limit"))
    requested, allocated = live_records.tres(job.get("tres_req_str")), live_records.tres(job.get("tres_alloc_str"))
    names = live_records.nodes(job.get("nodes"))
    details = job.get("gres_detail")
    return live_records.job(
        job_id=job["job_id"],
        array_job_id=array_id,
        array_task_id=None if array_id is None else _number(job.get("array_task_id")),
        array_tasks=None if array_id is None or tasks is None else tasks.partition("%")[0],
        array_limit=None if array_id is None else _number(job.get("array_max_tasks")) or None,
        het_job_id=het_id,
        het_offset=None if het_id is None else _number(job.get("het_job_offset")),
        name=job.get("name") or None,
        user=live_records.word(job.get("user_name")),
        uid=_number(job.get("user_id")),
        account=live_records.word(job.get("account")),
        partitions=_list(job.get("partition")),
        qos=live_records.word(job.get("qos")),
        state=live_records.state(_words(job.get("job_state"))),
        reason=live_records.word(job.get("state_description")) or live_records.word(job.get("state_reason")),
        priority=_number(job.get("priority")),
        by_admin=job.get("state_reason") == live_records.BY_ADMIN,
        submit=live_records.moment(_number(job.get("submit_time"))),
        eligible=live_records.moment(_number(job.get("eligible_time"))),
        start=live_records.moment(_number(job.get("start_time"))),
        end=live_records.moment(_number(job.get("end_time"))),
        time_limit_s=None if limit is None else limit * 60,
        nodes=names,
        batch_host=live_records.word(job.get("batch_host")),
        node_count=_number(job.get("node_count")),
        cpus=_number(job.get("cpus")),
        requeue=bool(job.get("requeue")),
        restarts=_number(job.get("restart_cnt")) or 0,
        tres_requested=requested,
        tres_allocated=allocated,
        gpus_requested=live_records.gpus(requested),
        gpus_allocated=live_records.gpus(allocated),
        node_gpus=live_records.node_gpus(names, [str(detail) for detail in details])
        if isinstance(details, list)
        else None,
        features=live_records.word(job.get("features")),
        reservation=live_records.word(job.get("resv_name")),
        comment=job.get("comment") or None,
        admin_comment=job.get("admin_comment") or None,
        # From v0.0.43 on, the path without patterns has a name of its own.
        stdout=None if waiting else job.get("stdout_expanded", job.get("standard_output")) or None,
        stderr=None if waiting else job.get("stderr_expanded", job.get("standard_error")) or None,
        batch=bool(job.get("batch_flag")),
        requests_share=live_records.requests_share(*(job.get(f"tres_per_{each}") for each in _REQUESTS)),
        nodes_required=live_records.nodes(job.get("required_nodes") or None),
        nodes_expected=live_records.nodes(job.get("scheduled_nodes") or None),
        nodes_excluded=live_records.nodes(job.get("excluded_nodes") or None),
    )


def _step(step: Mapping[str, Any]) -> Step | None:
    job, dot, name = str(step.get("id") or "").partition(".")
    if not dot or not (job.isascii() and job.isdigit()) or len(job) > _DIGITS:
        return None
    name = identifiers.SPECIAL_STEPS.get(name, name)
    tres = step.get("tres")
    amounts = live_records.tres(tres.get("allocation") if isinstance(tres, Mapping) else None)
    time = step.get("time")
    return Step(
        job_id=int(job),
        step=name,
        name=live_records.word(step.get("name")),
        state=live_records.state(_words(step.get("state"))),
        nodes=live_records.nodes(live_records.word(step.get("nodes"))),
        start=live_records.moment(_number(time.get("start"))) if isinstance(time, Mapping) else None,
        tasks=_number(step.get("number_tasks")),
        gpus=(live_records.gpus(amounts) or GpuCount(0)) if amounts else None,
        tres=amounts,
    )


def _node(node: Mapping[str, Any]) -> Node:
    words = _words(node.get("state"))
    configured = live_records.gpus_of_gres(node.get("gres")) or live_records.gpus(live_records.tres(node.get("tres")))
    used = live_records.gpus(live_records.tres(node.get("tres_used"))) or GpuCount(0)
    return Node(
        name=str(node["name"]),
        state=words[0] if words else "UNKNOWN",
        flags=frozenset(words[1:]),
        reason=node.get("reason") or None,
        reason_user=live_records.word(node.get("reason_set_by_user")) if node.get("reason") else None,
        reason_time=live_records.moment(_number(node.get("reason_changed_at"))),
        gpus=configured,
        gpus_used=None if configured is None else used,
        partitions=tuple(_words(node.get("partitions"))),
        cpus=_number(node.get("cpus")) or 0,
        cpus_used=_number(node.get("alloc_cpus")) or 0,
        memory_mib=_number(node.get("real_memory")) or 0,
        memory_used_mib=_number(node.get("alloc_memory")) or 0,
        features=tuple(_words(node.get("features"))),
        version=live_records.word(node.get("version")),
    )


def _words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    return [str(value)] if value else []


def _list(value: Any) -> tuple[str, ...]:
    return tuple(part for part in str(value or "").split(",") if part)


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_SETTING = re.compile(r"^([A-Za-z][A-Za-z0-9_:.\[\]-]*)\s*= ?(.*)$")
_WORD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_]*)=((?:(?! [A-Za-z][A-Za-z0-9_]*=).)*)")
_VERSION = re.compile(r"\b(\d{2}\.\d{2})(?:\.(\d+))?")


def config(text: str) -> dict[str, str]:
    """Return the settings of ``scontrol show config``, those of the cgroup, MPI and plugin sections included."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        if match := _SETTING.match(line.strip()):
            value = match[2].strip()
            settings.setdefault(match[1], "" if value == "(null)" else value)
    return settings


def partitions(text: str) -> tuple[Partition, ...]:
    """Parse ``scontrol --oneliner show partitions``: the JSON output does not mark the default partition."""
    rows = (dict(_WORD.findall(line)) for line in text.split("\n") if "PartitionName=" in line)
    return tuple(_partition(words) for words in rows if "PartitionName" in words)


def _partition(words: Mapping[str, str]) -> Partition:
    tres = live_records.tres(live_records.word(words.get("TRES")))
    return Partition(
        name=words["PartitionName"],
        nodes=live_records.nodes(live_records.word(words.get("Nodes"))),
        state=words.get("State", "UNKNOWN"),
        default=words.get("Default") == "YES",
        tres=tres,
        gpus=live_records.gpus(tres),
    )


def span_s(text: str) -> int | None:
    """Return a time span as Slurm writes it in seconds; ``None``: unlimited or unknown."""
    try:
        seconds = units.parse_duration_s(text)
    except ValueError:
        return None
    return None if seconds is None else round(seconds)


def version(text: str) -> str | None:
    """Return the version number in ``slurm-wlm 26.05.5`` or ``slurm 24.11.5-1``."""
    match = _VERSION.search(text)
    return match[0] if match else None


def release(text: str | None) -> str | None:
    """Return ``26.05`` from ``26.05.5``: the part that all components of Slurm must share."""
    match = _VERSION.search(text or "")
    return match[1] if match else None
