"""Which way of talking to Slurm is there on this machine, and which one is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slurm_affinode import process
from slurm_affinode.errors import AffinodeError
from slurm_affinode.slurm import live_text
from slurm_affinode.slurm.commands import Runner
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.faults import BackendUnusableError
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.pyslurm_client import PyslurmClient, Worker, start_worker

Backend = Literal["auto", "pyslurm", "commands"]


@dataclass(frozen=True, slots=True)
class Availability:
    """One way of talking to Slurm."""

    backend: str
    version: str | None
    """Of the programs, or of pyslurm and its libslurm; ``None`` where it is not there."""
    reason: str | None = None
    """Why it cannot be used; ``None`` where it can."""
    hint: str | None = None

    @property
    def usable(self) -> bool:
        """Can be used."""
        return self.reason is None


def release_of_library(number: int) -> str:
    """The release of libslurm's interface ``number``: one for each half-yearly release since 23.11 (40)."""
    half_years = number + 7
    return f"{half_years // 2:02d}.{'11' if half_years % 2 else '05'}"


def examine(run: Runner = process.run, start: Callable[[], Worker] = start_worker) -> tuple[Availability, Availability]:
    """What can be said of the commands and of pyslurm. Raises nothing."""
    commands = CommandsClient(run)
    try:
        found = Availability("commands", commands.version())
    except AffinodeError as error:
        found = Availability("commands", None, str(error), error.hint)
    with PyslurmClient(commands, start) as client:
        return found, _pyslurm(client, live_text.release(found.version))


def _pyslurm(client: PyslurmClient, site: str | None) -> Availability:
    try:
        client.greet()
    except AffinodeError as error:
        return Availability("pyslurm", None, str(error), error.hint)
    number = client.hello.get("api")
    release = release_of_library(number) if isinstance(number, int) else None
    version = f"{client.hello.get('pyslurm')} with libslurm of Slurm {release or '(unknown)'}"
    if release is None or site is None or release != site:
        reason = f"its libslurm is of Slurm {release or '(unknown)'}, the site's Slurm is {site or '(unknown)'}"
        return Availability("pyslurm", version, reason, "build pyslurm against the site's Slurm, see docs/slurm.md")
    return Availability("pyslurm", version)


def open_client(
    backend: Backend = "auto",
    *,
    run: Runner = process.run,
    start: Callable[[], Worker] = start_worker,
) -> SlurmClient:
    """A client for the live Slurm.

    ``auto`` is pyslurm where a process of its own can import it and its libslurm is of the site's release, else Slurm's
    commands. Raises ``BackendUnusableError`` where what was asked for by name cannot be used, ``UnreachableError``
    where there is no Slurm on this machine.
    """
    commands = CommandsClient(run)
    if backend == "commands":
        return commands
    site = live_text.release(commands.version())
    client = PyslurmClient(commands, start)
    found = _pyslurm(client, site)
    if found.usable:
        return client
    client.close()
    if backend == "auto":
        return commands
    raise BackendUnusableError(f"pyslurm cannot be used: {found.reason}", hint=found.hint)
