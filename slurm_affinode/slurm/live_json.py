"""``scontrol show ... --json=v0.0.42`` -> jobs, steps and nodes.

The data parser is named so that Slurm 24.11 and 26.05 give the same keys; a number is ``{set, infinite, number}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_affinode.errors import UnreachableError
from slurm_affinode.model.cluster import ENDED_STATES, GpuCount, Job, Node, Step
from slurm_affinode.slurm import jobid, live

PARSER = "v0.0.42"
_DIGITS = 20


def document(data: bytes, key: str) -> tuple[list[Mapping[str, Any]], bool]:
    """The records below ``key``, and whether slurmctld has answered at all.

    scontrol writes an empty list and ends with 0 also where slurmctld is down, or has no job of the id asked for: the
    time of the last update, which is 0 then, is the only sign. Raises ``UnreachableError`` where scontrol did not
    write JSON with that key.
    """
    text = data.decode("utf-8", "backslashreplace").replace("\\x", "\\\\x") if not _is_utf8(data) else data.decode()
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        found = None
    records = found.get(key) if isinstance(found, dict) else None
    if not isinstance(records, list):
        raise UnreachableError(
            f"scontrol --json={PARSER} did not answer with JSON",
            hint="it needs Slurm's plugins serializer/json and data_parser/v0.0.42 (Debian: slurm-wlm-basic-plugins)",
        )
    updated = found.get("last_update") if isinstance(found, dict) else None
    answered = bool(records) or updated is None or _number(updated) != 0
    return [record for record in records if isinstance(record, dict)], answered


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def jobs(records: Iterable[Mapping[str, Any]]) -> tuple[Job, ...]:
    """The jobs; a record without a usable id is left out."""
    return tuple(_job(record) for record in records if isinstance(record.get("job_id"), int))


def steps(records: Iterable[Mapping[str, Any]]) -> tuple[Step, ...]:
    """The steps; a record without a usable id is left out."""
    return tuple(step for record in records if (step := _step(record)) is not None)


def nodes(records: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """The nodes; a record without a name is left out."""
    return tuple(_node(record) for record in records if live.word(record.get("name")))


def _job(job: Mapping[str, Any]) -> Job:
    state = live.state(_words(job.get("job_state")))
    pending, ended = _phase(state)
    array_id = _number(job.get("array_job_id")) or None
    het_id = _number(job.get("het_job_id")) or None
    tasks = live.word(job.get("array_task_string"))
    # Tasks without a record of their own have no output yet: Slurm shows a path with a number that is no task.
    waiting = array_id is not None and tasks is not None
    limit = _number(job.get("time_limit"))
    start, end = live.moment(_number(job.get("start_time"))), live.moment(_number(job.get("end_time")))
    requested, allocated = live.tres(job.get("tres_req_str")), live.tres(job.get("tres_alloc_str"))
    names = live.nodes(job.get("nodes"))
    priority = _number(job.get("priority"))
    details = job.get("gres_detail")
    return Job(
        job_id=job["job_id"],
        array_job_id=array_id,
        array_task_id=None if array_id is None else _number(job.get("array_task_id")),
        array_tasks=None if array_id is None or tasks is None else tasks.partition("%")[0],
        array_limit=None if array_id is None else _number(job.get("array_max_tasks")) or None,
        het_job_id=het_id,
        het_offset=None if het_id is None else _number(job.get("het_job_offset")),
        name=job.get("name") or None,
        user=live.word(job.get("user_name")),
        uid=_number(job.get("user_id")),
        account=live.word(job.get("account")),
        partitions=_list(job.get("partition")),
        qos=live.word(job.get("qos")),
        state=state,
        reason=live.word(job.get("state_description")) or live.word(job.get("state_reason")),
        priority=priority,
        held=pending and priority == 0,
        held_by_admin=pending and priority == 0 and job.get("state_reason") == live.BY_ADMIN,
        submit=live.moment(_number(job.get("submit_time"))),
        eligible=live.moment(_number(job.get("eligible_time"))),
        start=None if pending else start,
        end=end if ended or state == "COMPLETING" else None,
        expected_start=start if pending else None,
        time_limit_s=None if limit is None else limit * 60,
        nodes=names,
        batch_host=live.word(job.get("batch_host")),
        node_count=_number(job.get("node_count")),
        cpus=_number(job.get("cpus")),
        requeue=bool(job.get("requeue")),
        restarts=_number(job.get("restart_cnt")) or 0,
        tres_requested=requested,
        tres_allocated=allocated,
        gpus_requested=live.gpus(requested),
        gpus_allocated=live.gpus(allocated),
        node_gpus=live.node_gpus(names, [str(one) for one in details]) if isinstance(details, list) else None,
        features=live.word(job.get("features")),
        reservation=live.word(job.get("resv_name")),
        comment=job.get("comment") or None,
        admin_comment=job.get("admin_comment") or None,
        stdout=None if waiting else job.get("standard_output") or None,
        stderr=None if waiting else job.get("standard_error") or None,
        batch=bool(job.get("batch_flag")),
        nodes_required=live.nodes(job.get("required_nodes") or None),
        nodes_expected=live.nodes(job.get("scheduled_nodes") or None) if pending else (),
        nodes_excluded=live.nodes(job.get("excluded_nodes") or None),
    )


def _phase(state: str) -> tuple[bool, bool]:
    return state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), state in ENDED_STATES


def _step(step: Mapping[str, Any]) -> Step | None:
    job, dot, name = str(step.get("id") or "").partition(".")
    if not dot or not (job.isascii() and job.isdigit()) or len(job) > _DIGITS:
        return None
    name = jobid.SPECIAL_STEPS.get(name, name)
    tres = step.get("tres")
    amounts = live.tres(tres.get("allocation") if isinstance(tres, Mapping) else None)
    time = step.get("time")
    return Step(
        job_id=int(job),
        step=name,
        name=live.word(step.get("name")),
        state=live.state(_words(step.get("state"))),
        nodes=live.nodes(live.word(step.get("nodes"))),
        start=live.moment(_number(time.get("start"))) if isinstance(time, Mapping) else None,
        tasks=_number(step.get("number_tasks")),
        gpus=(live.gpus(amounts) or GpuCount(0)) if amounts else None,
        tres=amounts,
    )


def _node(node: Mapping[str, Any]) -> Node:
    words = _words(node.get("state"))
    configured = live.gpus_of_gres(node.get("gres")) or live.gpus(live.tres(node.get("tres")))
    used = live.gpus(live.tres(node.get("tres_used"))) or GpuCount(0)
    return Node(
        name=str(node["name"]),
        state=words[0] if words else "UNKNOWN",
        flags=frozenset(words[1:]),
        reason=node.get("reason") or None,
        reason_user=live.word(node.get("reason_set_by_user")) if node.get("reason") else None,
        reason_time=live.moment(_number(node.get("reason_changed_at"))),
        gpus=configured,
        gpus_used=None if configured is None else used,
        partitions=tuple(_words(node.get("partitions"))),
        cpus=_number(node.get("cpus")) or 0,
        cpus_used=_number(node.get("alloc_cpus")) or 0,
        memory_mib=_number(node.get("real_memory")) or 0,
        memory_used_mib=_number(node.get("alloc_memory")) or 0,
        features=tuple(_words(node.get("features"))),
        version=live.word(node.get("version")),
    )


def _words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(one) for one in value]
    return [str(value)] if value else []


def _list(value: Any) -> tuple[str, ...]:
    return tuple(part for part in str(value or "").split(",") if part)


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
