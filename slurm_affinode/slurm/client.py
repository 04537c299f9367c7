"""Detection and choice of the Slurm backend: pyslurm or Slurm's commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.process import Helper
from slurm_affinode.slurm import scontrol
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.interface import BackendUnusableError, Runner, SlurmClient
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
        found = Availability("commands", commands.version())
    except AffinodeError as error:
        found = Availability("commands", None, str(error), error.hint)
    with PyslurmClient(commands, start) as client:
        return found, _pyslurm(client, scontrol.release(found.version))


def _pyslurm(client: PyslurmClient, site: str | None) -> Availability:
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
    return Availability("pyslurm", version)


def open_client(
    backend: Backend = "auto",
    *,
    run: Runner = process.run,
    start: Callable[[], Helper] = start_worker,
) -> SlurmClient:
    """Open a client for the live Slurm.

    ``auto`` is pyslurm if a separate process can import it and its libslurm is of the site's release, else Slurm's
    commands. Raises ``BackendUnusableError`` if a backend chosen by name cannot be used, ``UnreachableError`` if Slurm
    is not installed on this machine.
    """
    commands = CommandsClient(run)
    if backend == "commands":
        return commands
    site = scontrol.release(commands.version())
    client = PyslurmClient(commands, start)
    found = _pyslurm(client, site)
    if found.usable:
        return client
    client.close()
    if backend == "auto":
        return commands
    raise BackendUnusableError(f"pyslurm cannot be used: {found.reason}", hint=found.hint)
