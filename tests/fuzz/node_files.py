"""Files of a node for its programs: announcements, environments of jobs, raised memory limits; and of unknown jobs.

The user chooses the environment. The others are written by root, and may be damaged, or signed by a malicious node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shlex
from collections.abc import Iterator
from random import Random

from fuzz.mutation import mutated, mutated_json, some, text
from fuzz.places import directory, put
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.suspension.job import environment as job_environment
from slurm_affinode.suspension.job import memory_limits
from slurm_affinode.suspension.job.announcements import AnnouncementError, Announcements
from slurm_affinode.suspension.records import sweep

_KEY = b"k" * 32
_ANNOUNCEMENT = (
    b"version=2\njob=7\nuid=2001\ngid=2001\ngroups=4,24\npid=300\nstarted=12345\nkeeper=200\nkeeper_started=12000\n"
    b"pid_namespace=4:4026532500\nmount_namespace=4:4026532501\nprogram=65024:131\n"
)
_ANNOUNCED = (b"job=7", b"job=8", b"uid=0", b"pid=1\n", b":", b"=", b"\r", b"\x0b", b"\x1c", b"\xb2", b"9" * 21)


@contextlib.contextmanager
def _announcements() -> Iterator[Check]:
    """An accepted announcement has each value once, and those of this job."""
    with directory() as place:
        announcements = Announcements(place, owner=os.geteuid())

        def check(data: bytes) -> bool:
            put(str(place / "7"), data)
            result = announcements.of(7)
            if result is None or result.job_id != 7:
                raise Wrong(f"{result}")
            lines = data.decode("ascii", "replace").splitlines()
            for field in dataclasses.fields(result):
                value = getattr(result, field.name)
                if isinstance(value, User):
                    ids = (line for line in lines if line.partition("=")[0] in ("uid", "gid", "groups"))
                    numbers = re.findall("[0-9]+", " ".join(ids))
                    if sorted(map(int, numbers)) != sorted((value.uid, value.gid, *value.groups)):
                        raise Wrong(f"the owner is {value}, of {numbers}")
                    continue
                values = value if isinstance(value, tuple) else (value,)
                key = "job" if field.name == "job_id" else field.name
                written = [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]
                if len(written) != 1 or [int(number) for number in written[0].split(":")] != list(values):
                    raise Wrong(f"{field.name} is {value}, of {written}")
            return True

        yield check


_VARIABLES = (
    "SLURM_JOB_ID=7", "SLURM_JWT=eyJ", "SLURM_JOB_NAME=", "SLURMD_NODENAME=c1", "CUDA_VISIBLE_DEVICES=0,1", "PATH=/bin",
    "SLURM_", "=", "SLURM_A B=", "SLURM", "LD_PRELOAD=/x", "SLURM_X='", "SLURM_Y=$(id)", "SLURM_e=",
)  # fmt: skip


def _environ(rng: Random) -> bytes:
    """Return the environment of a process, as the kernel shows it, often changed."""
    variables = [some(rng, _VARIABLES) + text(rng) for _ in range(some(rng, (0, 1, 2, 8)))]
    data = b"".join(variable.encode("utf-8", "surrogateescape") + b"\0" for variable in variables)
    return mutated(rng, data, (b"\0", b"=", b"'", b"\n", b"SLURM_")) if rng.random() < 0.5 else data


@contextlib.contextmanager
def _environments() -> Iterator[Check]:
    """Only assignments of variables of Slurm are in the file, and each has the value of the process."""
    names = re.compile(
        rb"SLURM[A-Z0-9_]*|CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
    )

    def check(data: bytes) -> bool:
        expected = {}
        for entry in data.split(b"\0")[:-1]:
            name, equals, value = entry.partition(b"=")
            if equals and len(name) <= 85 and names.fullmatch(name) and not name.startswith(b"SLURM_JWT"):
                expected[name] = value
        words = [os.fsencode(word) for word in shlex.split(os.fsdecode(job_environment.exports(data)))]
        result = dict(word.partition(b"=")[::2] for word in words[1::2])
        if result != expected or words[::2] != [b"export"] * len(expected):
            raise Wrong(f"{words!r:.200} of {expected!r:.200}")
        return bool(result)

    yield check


_LIMITS = {
    "version": 1, "boot": "0e2a", "limits": [
        {"cgroup": "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7", "device": 26, "inode": 4711,
         "name": "memory.max", "before": 1 << 30, "written": [1 << 30, 2 << 30]},
    ],
    "over_since": 4711.25,
}  # fmt: skip


@contextlib.contextmanager
def _limits() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        decoded = memory_limits._decoded(data.decode("utf-8", "replace"))
        if memory_limits._decoded(json.dumps({"version": 1, **dataclasses.asdict(decoded)})) != decoded:
            raise Wrong(f"{decoded} is another one when it is written and read again")
        for limit in decoded.limits:
            if "/" in limit.name or limit.before < 0 or min(limit.written, default=-1) < 0:
                raise Wrong(f"{limit} would be written")
        if decoded.over_since is not None and not 0 <= decoded.over_since < math.inf:
            raise Wrong(f"the grace period began at {decoded.over_since}")
        return bool(decoded.limits)

    yield check


_ABSENT = {"since": 1700000000.5, "confirmed": False}
_STOPPED = {"since": 1.5, "node": "c2", "store": "/s", "going": 7, "present": 8, "jobs": ["main.7", "main.8"]}


def _unknown(rng: Random) -> bytes:
    return some(rng, (b"unknown\n", b"stopped\n")) + mutated_json(rng, some(rng, (_ABSENT, _STOPPED)))


@contextlib.contextmanager
def _absences() -> Iterator[Check]:
    """A malicious node with the key signs anything."""
    logging.disable(logging.CRITICAL)
    with directory() as root:
        signer = Signer(_KEY, "c2")
        absences = sweep.Absences(
            root, Signer(_KEY, "c1"), "main", keep_s=3600.0, clock=lambda place, node: 1700003600.0
        )
        absences._ask = lambda call, late=None: call()  # type: ignore[assignment]
        (root / "unknown").mkdir()

        def check(data: bytes) -> bool:
            kind, _, body = data.partition(b"\n")
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(body)
                if isinstance(value, dict):
                    purpose, name = (
                        (sweep._PURPOSE, "main.7.json")
                        if kind == b"unknown"
                        else (sweep._STOPPED, "sweep-stopped.main.json")
                    )
                    body = signer.encode(purpose, name, value).encode()
            place = root / "unknown" / "main.7.json" if kind == b"unknown" else root / "sweep-stopped.main.json"
            put(str(place), body)
            result, stopped = absences.all(), absences.stopped()
            for item in result.values():
                if not math.isfinite(item.since) or item.age_s < 0 or not isinstance(item.confirmed, bool):
                    raise Wrong(f"{item}")
            if stopped is not None and not (math.isfinite(stopped.since) and str(stopped)):
                raise Wrong(f"{stopped}")
            place.unlink()
            return bool(result) or stopped is not None

        yield check


TARGETS = (
    Target(
        "announcement", "announcements of shepherds", lambda rng: mutated(rng, _ANNOUNCEMENT, _ANNOUNCED),
        _announcements, (AnnouncementError,),
    ),
    Target("job-environment", "environ of a shepherd, for the programs of its job", _environ, _environments),
    Target(
        "memory-limits", "JOBID.json of memory-limits", lambda rng: mutated_json(rng, _LIMITS, (b"memory.high", b"-1")),
        _limits, (ValueError,),
    ),
    Target("unknown-jobs", "records of unknown jobs beside the shared store", _unknown, _absences),
)  # fmt: skip
