"""CPU affinities of threads, which CRIU does not carry.

A restored thread would run on all CPUs of its job. Other nodes and attempts have other CPUs, so an affinity is recorded
as positions among the CPUs of the job.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from slurm_affinode.base import json_values
from slurm_affinode.base.pidfd import Namespace, Process
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image.criu_images import BadImage
from slurm_affinode.checkpoint.image.private_image import PrivateImage

LOG = logging.getLogger(__name__)
INDEX = "affinities.json"
_MOST_CPUS = 1 << 16


def record(directory_fd: int, space: Namespace) -> None:
    """Record the threads of a stopped tree that do not use all CPUs of their job."""
    job_cpus = sorted(_cpus(space.init.status()))
    positions = {cpu: index for index, cpu in enumerate(job_cpus)}
    affinities: dict[str, list[int]] = {}
    for _, process in space.processes():
        for inner, outer in _threads(process):
            with suppress(OSError, KeyError, ValueError):
                thread_cpus = _cpus(process.status(f"task/{outer}/status"))
                if thread_cpus != set(job_cpus):
                    affinities[str(inner)] = sorted(positions[cpu] for cpu in thread_cpus)
    if affinities:
        root_directory.write(directory_fd, INDEX, json.dumps(affinities).encode())


def restore(image: PrivateImage, space: Namespace) -> None:
    """Give the threads of a tree that CRIU holds their affinities, among the CPUs of the new attempt.

    If it has too few CPUs for one of them, all stay on all CPUs of the job. Raises ``BadImage``.
    """
    if INDEX not in image.names():
        return
    masks = recorded(image.read(INDEX))
    job_cpus = sorted(_cpus(space.init.status()))
    if any(positions[-1] >= len(job_cpus) for positions in masks.values()):
        LOG.warning(
            "its threads run on all CPUs: their affinities need more than the %d CPUs it has now", len(job_cpus)
        )
        return
    for _, process in space.processes():
        for inner, outer in _threads(process):
            if inner in masks:
                with suppress(OSError):
                    os.sched_setaffinity(outer, {job_cpus[index] for index in masks[inner]})
                process.check()


def recorded(index: bytes) -> dict[int, list[int]]:
    """Decode the record of a dump: thread -> positions of its CPUs, ascending. Raises ``BadImage``."""
    affinities = {}
    try:
        for name, value in json_values.table(json_values.loads(index)).items():
            positions = sorted(json_values.whole(cpu, _MOST_CPUS) for cpu in json_values.typed(list, value))
            if positions:
                affinities[json_values.whole(int(name))] = positions
    except ValueError as error:
        raise BadImage(f"{INDEX}: {error}") from None
    return affinities


def _threads(process: Process) -> Iterator[tuple[int, int]]:
    """Yield the threads of a process: the ID in the job's namespace, and that of this node."""
    with suppress(OSError):
        for outer in process.threads():
            with suppress(OSError, KeyError, ValueError):
                yield int(process.status(f"task/{outer}/status")["NSpid"].split()[-1]), outer


def _cpus(status: Mapping[str, str]) -> set[int]:
    """Return the CPUs that a ``status`` file shows. Raises ``KeyError``, ``ValueError``."""
    cpus: set[int] = set()
    for part in status["Cpus_allowed_list"].strip().split(","):
        first, _, last = part.partition("-")
        if int(last or first) >= _MOST_CPUS:
            raise ValueError(part)
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
