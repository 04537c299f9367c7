"""What the pyslurm worker answers -> jobs, steps and nodes, the same as from the commands' JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_affinode.model.cluster import ENDED_STATES, GpuCount, Job, Node, Step
from slurm_affinode.slurm import live


def jobs(records: Iterable[Mapping[str, Any]]) -> tuple[Job, ...]:
    """The jobs. ``node_gpus`` is ``None``: pyslurm does not show it."""
    return tuple(_job(record) for record in records if isinstance(record.get("id"), int))


def steps(records: Iterable[Mapping[str, Any]]) -> tuple[Step, ...]:
    """The steps."""
    return tuple(_step(record) for record in records)


def nodes(records: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """The nodes."""
    return tuple(_node(record) for record in records)


def _job(job: Mapping[str, Any]) -> Job:
    state = str(job["state"] or "UNKNOWN")
    pending, ended = state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), state in ENDED_STATES
    array, het = job["array_id"] or None, job["heterogeneous_id"] or None
    tasks = live.word(job["array_tasks_waiting"]) if array else None
    limit = _minutes(job["time_limit"])
    start, end = live.moment(job["start_time"]), live.moment(job["end_time"])
    requested, allocated = _tres(job["tres_requested"]), _tres(job["tres_allocated"])
    found = job.get("steps")
    return Job(
        job_id=job["id"],
        array_job_id=array,
        array_task_id=job["array_task_id"] if array else None,
        array_tasks=tasks.partition("%")[0] if tasks else None,
        array_limit=job["array_tasks_parallel"] or None if array else None,
        het_job_id=het,
        het_offset=job["heterogeneous_offset"] or 0 if het else None,
        name=job["name"] or None,
        user=live.word(job["user_name"]),
        uid=job["user_id"],
        account=live.word(job["account"]),
        partitions=tuple(part for part in str(job["partition"] or "").split(",") if part),
        qos=live.word(job["qos"]),
        state=state,
        reason=live.word(job["state_reason"]),
        priority=job["priority"],
        held=pending and job["priority"] == 0,
        submit=live.moment(job["submit_time"]),
        eligible=live.moment(job["eligible_time"]),
        start=None if pending else start,
        end=end if ended or state == "COMPLETING" else None,
        expected_start=start if pending else None,
        time_limit_s=limit,
        nodes=live.nodes(_joined(job["allocated_nodes"])),
        nodes_required=live.nodes(_joined(job.get("required_nodes"))),
        nodes_excluded=live.nodes(_joined(job.get("excluded_nodes"))),
        nodes_expected=live.nodes(_joined(job.get("scheduled_nodes"))) if pending else (),
        batch_host=live.word(job["batch_host"]),
        node_count=job["num_nodes"],
        cpus=job["cpus"],
        requeue=bool(job["is_requeueable"]),
        restarts=job["requeue_count"] or 0,
        tres_requested=requested,
        tres_allocated=allocated,
        gpus_requested=live.gpus(requested),
        gpus_allocated=live.gpus(allocated),
        node_gpus=None,
        features=live.word(_joined(job["constraints"])),
        reservation=live.word(job["reservation"]),
        comment=job["comment"] or None,
        admin_comment=job["admin_comment"] or None,
        stdout=None if tasks else job["standard_output"] or None,
        stderr=None if tasks else job["standard_error"] or None,
        batch=bool(job["is_batch_job"]),
        steps=steps(found) if found is not None else None,
    )


def _step(step: Mapping[str, Any]) -> Step:
    tres = _tres(step["tres"])
    return Step(
        job_id=step["job_id"],
        step=str(step["id"]),
        name=live.word(step["name"]),
        state=live.word(step["state"]),
        nodes=live.nodes(_joined(step["allocated_nodes"])),
        start=live.moment(step["start_time"]),
        tasks=step["ntasks"],
        gpus=(live.gpus(tres) or GpuCount(0)) if tres else None,
        tres=tres,
    )


def _node(node: Mapping[str, Any]) -> Node:
    words = str(node["state"] or "UNKNOWN").split("+")
    configured = live.gpus(_gres(node["configured_gres"]))
    used = live.gpus(_gres(node["allocated_gres"])) or GpuCount(0)
    return Node(
        name=node["name"],
        state=words[0],
        flags=frozenset(words[1:]),
        reason=node["reason"] or None,
        reason_user=live.word(node["reason_user"]) if node["reason"] else None,
        reason_time=live.moment(node["reason_time"]),
        gpus=configured,
        gpus_used=None if configured is None else used,
        partitions=tuple(node["partitions"] or ()),
        cpus=node["total_cpus"] or 0,
        cpus_used=node["allocated_cpus"] or 0,
        memory_mib=node["real_memory"] or 0,
        memory_used_mib=node["allocated_memory"] or 0,
        features=tuple(node["available_features"] or ()),
        version=live.word(node["slurm_version"]),
    )


def _tres(amounts: Mapping[str, int] | None) -> dict[str, str]:
    # pyslurm counts memory in MiB; Slurm writes the unit.
    return {name: f"{count}M" if name == "mem" else str(count) for name, count in (amounts or {}).items()}


def _gres(amounts: Mapping[str, int] | None) -> dict[str, str]:
    return {f"gres/{name}": str(count) for name, count in (amounts or {}).items()}


def _minutes(value: object) -> int | None:
    return value * 60 if isinstance(value, int) and not isinstance(value, bool) else None


def _joined(value: str | Sequence[str] | None) -> str | None:
    return value if value is None or isinstance(value, str) else ",".join(value)
