"""Slurm's data on jobs, with names, comments and paths chosen by users; and the environment of the hooks."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from fuzz.mutation import mutated, mutated_json, some, text
from fuzz.places import directory
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.agent import hooks
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.core.cleanup_policy import read_policy
from slurm_affinode.slurm import hostlist, scontrol, squeue

_DATA = Path(__file__).parents[1] / "data" / "slurm"
_MARK = "|4f1c9a0d2b7e5a63|"
_ROW = (
    "7",
    "3",
    "6",
    "N/A",
    "N/A",
    "alice",
    "2001",
    "vision",
    "gpu",
    "normal",
    "RUNNING",
    "None",
    "4294901757",
    "1700000000",
    "1700000000",
    "1700000100",
    "1700086500",
    "1-00:00:00",
    "gpu[01-02]",
    "gpu01",
    "2",
    "8",
    "cpu=8,mem=16G,gres/gpu:h100=2",
    "0",
    "1",
    "1",
    "(null)",
    "(null)",
    "",
    "gpu03",
    "train",
    "(null)",
)


def _table(rng: Random) -> bytes:
    """Return rows of squeue; the mark is unpredictable for users."""
    rows = []
    for _ in range(some(rng, (1, 1, 2))):
        row = list(_ROW)
        for _ in range(some(rng, (0, 1, 2))):
            row[int(rng.random() * len(row))] = text(rng, 20)
        rows.append("".join(f"{field}{_MARK}" for field in row) + "\n")
    data = "".join(rows).encode("utf-8", "surrogateescape")
    return (
        mutated(rng, data, (_MARK.encode(), b"gpu[1-262145]", b"[1-9]" * 2000, b"99999999999"))
        if rng.random() < 0.5
        else data
    )


@contextlib.contextmanager
def _tables() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        jobs = list(squeue.jobs(data, _MARK))
        if any(not isinstance(job.job_id, int) or job.job_id < 0 for job in jobs):
            raise Wrong(f"{jobs}")
        if data.count(_MARK.encode()) == len(_ROW) and len(jobs) > 1:
            raise Wrong("one row has become several jobs")
        return bool(jobs)

    yield check


_JOB: dict[str, Any] = {
    "job_id": 7,
    "array_job_id": {"set": True, "infinite": False, "number": 6},
    "array_task_id": {"set": True, "number": 3},
    "array_task_string": "",
    "het_job_id": {"set": True, "number": 0},
    "job_state": ["RUNNING"],
    "user_name": "alice",
    "user_id": 2001,
    "account": "vision",
    "partition": "gpu,cpu",
    "qos": "normal",
    "state_reason": "None",
    "name": "train",
    "priority": {"set": True, "number": 4294901757},
    "submit_time": {"set": True, "number": 1700000000},
    "start_time": {"set": True, "number": 1700000100},
    "end_time": {"set": True, "infinite": False, "number": 1700086500},
    "time_limit": {"set": True, "number": 1440},
    "nodes": "gpu[01-02]",
    "batch_host": "gpu01",
    "node_count": {"set": True, "number": 2},
    "tres_req_str": "cpu=8,gres/gpu=2",
    "tres_alloc_str": "cpu=8,gres/gpu:h100=2",
    "gres_detail": ["gpu:h100:2(IDX:0-1)"],
    "comment": "x",
    "standard_output": "/home/alice/out",
    "batch_flag": True,
    "requeue": True,
    "restart_cnt": 0,
}
_STEP = {
    "id": "7.batch",
    "name": "batch",
    "state": ["RUNNING"],
    "nodes": "gpu01",
    "time": {"start": {"set": True, "number": 1}},
    "tres": {"allocation": "cpu=1"},
}
_NODE = {
    "name": "gpu01",
    "state": ["MIXED", "DRAIN"],
    "gres": "gpu:h100:4(S:0-1)",
    "tres": "gres/gpu=4",
    "tres_used": "gres/gpu=1",
    "reason": "x",
    "reason_changed_at": {"set": True, "number": 5},
    "partitions": ["gpu"],
    "features": ["a"],
}


def _document(rng: Random) -> bytes:
    kind, item = some(rng, (("jobs", _JOB), ("jobs", _JOB), ("steps", _STEP), ("nodes", _NODE)))
    whole = {kind: [item], "last_update": {"set": True, "number": 1700000000}}
    return kind.encode() + b"\n" + mutated_json(rng, whole, (b"gpu[1-262145]", b"[1-9]" * 2000, b"\\udc80"))


@contextlib.contextmanager
def _documents() -> Iterator[Check]:
    readers = {"jobs": scontrol.jobs, "steps": scontrol.steps, "nodes": scontrol.nodes}

    def check(data: bytes) -> bool:
        kind, _, body = data.partition(b"\n")
        name = kind.decode("ascii", "replace")
        if name not in readers:
            return False
        records, _ = scontrol.document(body, name)
        return bool(readers[name](records))

    yield check


def _texts(rng: Random) -> bytes:
    config = b"Configuration data as of 2026-01-01\n"
    config += (
        b"ClusterName             = main\nSlurmUser               = slurm(64030)\nSLURM_VERSION           = 24.11.5\n"
    )
    parts = b"PartitionName=gpu AllowGroups=ALL Default=YES Nodes=gpu[01-04] State=UP TRES=cpu=64,gres/gpu=16\n"
    return mutated(
        rng, some(rng, (config, parts)), (b"PartitionName=", b" = ", b"Nodes=", b"\r", b"\xe2\x80\xa8", b"[1-9]" * 500)
    )


@contextlib.contextmanager
def _plain() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        config_text = data.decode("utf-8", "backslashreplace")
        config = scontrol.config(config_text)
        scontrol.version(config_text)
        scontrol.release(config_text)
        scontrol.span_s(config_text[:40])
        return bool(scontrol.partitions(config_text)) or bool(config)

    yield check


def _hosts(rng: Random) -> bytes:
    return mutated(
        rng, b"gpu[01-04,07],login,c[1-2][3-4]x", (b"[", b"]", b"[0-9]", b"[1-262144]", b"[1]" * 3000, b",", b"-")
    )


@contextlib.contextmanager
def _hostlists() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        names = hostlist.expand(data.decode("utf-8", "backslashreplace"))
        if len(names) > hostlist.MAX_HOSTS or any("[" in name or not name.isprintable() for name in names):
            raise Wrong(f"{len(names)} names")
        return bool(names)

    yield check


# --- prolog and epilog


def _environment(rng: Random) -> bytes:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "2001", "SLURM_JOB_GPUS": "0,1"}
    for _ in range(some(rng, (0, 1, 1, 2))):
        key = some(rng, list(env))
        env[key] = (
            mutated(rng, env[key].encode(), (b"../", b"/etc/passwd", b"0.7", b"MIG-1", b","))
            .decode("latin-1")
            .replace("\0", "")
        )
    return json.dumps([some(rng, ("prolog", "epilog")), env]).encode()


@contextlib.contextmanager
def _hooks() -> Iterator[Check]:
    """Nothing is written except the mapping of GPUs, and no other error occurs."""
    with directory() as place:
        mapping = place / "map"
        requests: list[dict[str, Any]] = []

        def ask(run_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
            requests.append(dict(request))
            return {"ok": True}

        (place / "config.toml").write_text(f'[agent]\njob_map = "{mapping}"\n')

        def check(data: bytes) -> bool:
            which, env = json.loads(data)
            requests.clear()
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                code = hooks.main(which, place / "config.toml", env)
            if code != 0 or "a fault of its own" in errors.getvalue():
                raise Wrong(errors.getvalue()[:500])
            for request in requests:
                if not (isinstance(request["job"], int) and isinstance(request["uid"], int)):
                    raise Wrong(f"{request}")
            names = os.listdir(mapping) if mapping.exists() else []
            if sorted(os.listdir(place)) not in (["config.toml"], ["config.toml", "map"]) or any(
                not name.replace(".", "").isdigit() for name in names
            ):
                raise Wrong(f"{names}")
            for name in names:
                (mapping / name).unlink()
            return bool(requests)

        with mock.patch.object(hooks, "ask_local", ask):
            yield check


_POLICY = b"""[defaults]
idle = "2h"
[[policies]]
name = "gpu"
partitions = ["gpu"]
idle = "30m"
cancel = true
exclude_users = ["root"]
[epilog]
kill = true
wait = "20s"
"""


@contextlib.contextmanager
def _policies() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        _, faults = read_policy(data.decode("utf-8", "surrogateescape"), where="policy.toml")
        return not faults

    yield check


TARGETS = (
    Target("squeue", "squeue's table of all jobs", _table, _tables, (UnreachableError,)),
    Target("scontrol-json", "scontrol's JSON of jobs, steps and nodes", _document, _documents, (UnreachableError,)),
    Target("scontrol-text", "scontrol's text of settings and partitions", _texts, _plain),
    Target("hostlist", "lists of nodes", _hosts, _hostlists, (ValueError,)),
    Target("hooks", "the environment of prolog and epilog", _environment, _hooks),
    Target(
        "policy",
        "the policy of clean-ups",
        lambda rng: mutated(rng, _POLICY, (b"[", b"]", b"=", b"'''", b'"""', b"inf")),
        _policies,
        (AffinodeError, ValueError),
    ),
)
