"""Detection and choice of the Slurm backend: pyslurm or Slurm's commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.process import Helper
from slurm_affinode.slurm import scontrol
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.interface import BackendUnusableError, Runner, SlurmClient, UnknownJobError
from slurm_affinode.slurm.pyslurm_client import PyslurmClient, start_worker

Backend = Literal["auto", "pyslurm", "commands"]


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether one backend can be used on this machine."""

    backend: str
    version: str | None
    """Version of the programs, or of pyslurm and its libslurm; ``None`` if not installed."""
    reason: str | None = None
    """Why the backend cannot be used; ``None`` if it can."""
    hint: str | None = None

    @property
    def usable(self) -> bool:
        """Whether the backend can be used."""
        return self.reason is None


def release_of_library(number: int) -> str:
    """Return the Slurm release of a libslurm API version: one version per half-yearly release since 23.11 (40)."""
    half_years = number + 7
    return f"{half_years // 2:02d}.{'11' if half_years % 2 else '05'}"


def examine(run: Runner = process.run, start: Callable[[], Helper] = start_worker) -> tuple[Availability, Availability]:
    """Return the availability of the commands and of pyslurm. Raises nothing."""
    commands = CommandsClient(run)
    try:
        with_commands = Availability("commands", commands.version())
    except AffinodeError as error:
        with_commands = Availability("commands", None, str(error), error.hint)
    with PyslurmClient(commands, start) as client:
        return with_commands, _pyslurm(client, commands, scontrol.release(with_commands.version))


_BUILD = re.compile(r"(\d+)\.(\d+)")


def _release_of_build(version: object) -> str | None:
    """Return the Slurm release for which pyslurm was written: ``26.05`` for its versions 26.05.0 and 26.5.0."""
    match = _BUILD.match(str(version))
    return match and f"{int(match[1]):02d}.{int(match[2]):02d}"


_CHANGING = frozenset({"state", "reason", "priority", "end", "exit_code", "steps", "node_gpus"})
"""Fields of a job that may change between two requests, or that the clients do not both report."""


def difference(client: SlurmClient, commands: SlurmClient) -> str | None:
    """Return why ``client`` is not known to read job records as ``commands`` does; None if it does.

    The running job with the most CPUs is compared: fields that were moved in libslurm's structs are least likely to
    be equal there. Raises ``AffinodeError``.
    """
    running = [job for job in client.jobs() if job.array_job_id is None and job.het_job_id is None and job.allocated]
    for job in sorted(running, key=lambda job: (-(job.cpus or 0), job.job_id)):
        try:
            current_job = commands.job(job.job_id)
        except UnknownJobError:
            continue
        if not current_job.allocated or current_job.start != job.start:
            continue
        names = [name.name for name in fields(job) if name.name not in _CHANGING]
        differing = [name for name in names if getattr(job, name) != getattr(current_job, name)]
        if not differing:
            return None
        name = differing[0]
        return f"of job {job.id}, it reads {name} {getattr(job, name)!r}, scontrol {getattr(current_job, name)!r}"
    return "no job runs with which it could be verified"


def _pyslurm(client: PyslurmClient, commands: CommandsClient, site: str | None) -> Availability:
    try:
        client.greet()
    except AffinodeError as error:
        return Availability("pyslurm", None, str(error), error.hint)
    number = client.hello.get("api")
    release = release_of_library(number) if isinstance(number, int) else None
    version = f"{client.hello.get('pyslurm')} with libslurm of Slurm {release or '(unknown)'}"
    if release is None or site is None or release != site:
        reason = f"its libslurm is that of Slurm {release or '(unknown)'}, the site's Slurm is {site or '(unknown)'}"
        return Availability("pyslurm", version, reason, "build pyslurm against the site's Slurm, see docs/slurm.md")
    if (built := _release_of_build(client.hello.get("pyslurm"))) != site:
        # Releases change libslurm's structs: a version for another release may read other fields without an error.
        try:
            why = difference(client, commands)
        except AffinodeError as error:
            why = str(error)
        if why is not None:
            reason = f"it is for Slurm {built or '(unknown)'}, the site's Slurm is {site}, and {why}"
            return Availability("pyslurm", version, reason, "install the pyslurm of the site's release")
    return Availability("pyslurm", version)


def open_client(
    backend: Backend = "auto",
    *,
    run: Runner = process.run,
    start: Callable[[], Helper] = start_worker,
    warned: Callable[[str], object] = lambda _: None,
) -> SlurmClient:
    """Open a client for the live Slurm.

    ``auto`` is pyslurm if a separate process can import it, its libslurm is of the site's release, and pyslurm is
    for this release or reads a job as ``scontrol`` does; else Slurm's commands. ``warned`` is called with one line
    if an installed pyslurm is not used. Raises ``BackendUnusableError`` if a backend chosen by name cannot be used,
    ``UnreachableError`` if Slurm is not installed on this machine.
    """
    commands = CommandsClient(run)
    if backend == "commands":
        return commands
    site = scontrol.release(commands.version())
    client = PyslurmClient(commands, start)
    availability = _pyslurm(client, commands, site)
    if availability.usable:
        return client
    client.close()
    if backend == "auto":
        if availability.version is not None:
            warned(f"pyslurm is not used: {availability.reason}; Slurm's commands are used in its place")
        return commands
    raise BackendUnusableError(f"pyslurm cannot be used: {availability.reason}", hint=availability.hint)
