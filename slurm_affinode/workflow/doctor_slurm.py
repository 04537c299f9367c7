"""What ``doctor`` says of the live Slurm: how it is spoken to, its version, whether its daemons answer."""

from __future__ import annotations

from collections.abc import Callable

from slurm_affinode.errors import AffinodeError
from slurm_affinode.slurm import live_text
from slurm_affinode.slurm.backends import Availability, examine
from slurm_affinode.slurm.commands import Runner
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.pyslurm_client import Worker
from slurm_affinode.workflow.check import OK, PROBLEM, SKIPPED, UNREACHABLE, Check

_TIMEOUT_S = 30.0


def look(backend: str, run: Runner, start: Callable[[], Worker]) -> list[Check]:
    """The checks, in the order in which things are needed. Raises nothing."""
    commands, pyslurm = examine(run, start)
    if not commands.usable:
        if backend == "pyslurm" or "no such program" not in (commands.reason or ""):
            return [Check("Slurm", UNREACHABLE, commands.reason or "", commands.hint)]
        return [Check("Slurm", SKIPPED, f"not on this machine ({commands.reason})")]
    return [
        Check("Slurm", OK, f"version {commands.version}"),
        _backend(backend, commands, pyslurm),
        _controller(run, commands.version),
        _database(run),
    ]


def _backend(asked: str, commands: Availability, pyslurm: Availability) -> Check:
    used = pyslurm if pyslurm.usable and asked != "commands" else commands
    if asked == "pyslurm" and not pyslurm.usable:
        detail = f"pyslurm was asked for and cannot be used: {pyslurm.reason}"
        return Check("Slurm backend", PROBLEM, detail, pyslurm.hint)
    known = [
        f"{one.backend} {one.version or ''}".strip() + (": available" if one.usable else f": not usable: {one.reason}")
        for one in (pyslurm, commands)
    ]
    return Check("Slurm backend", OK, f"{used.backend} ({asked} was asked for); {'; '.join(known)}")


def _controller(run: Runner, version: str | None) -> Check:
    client = CommandsClient(run, timeout_s=_TIMEOUT_S)
    try:
        client.ping()
        theirs = client.config().get("SLURM_VERSION")
    except AffinodeError as error:
        return Check("slurmctld", UNREACHABLE, str(error), error.hint)
    if theirs and live_text.release(theirs) != live_text.release(version):
        return Check("slurmctld", OK, f"answers; it is of Slurm {theirs}, the commands here are of {version}")
    return Check("slurmctld", OK, "answers")


def _database(run: Runner) -> Check:
    hint = "is slurmdbd running, and may this user ask it? try: sacctmgr show cluster"
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=cluster"]
    try:
        done = run(argv, timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError as error:
        return Check("slurmdbd", UNREACHABLE, str(error), error.hint)
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode != 0:
        why = said[-1].removeprefix("sacctmgr: ").removeprefix("error: ") if said else "sacctmgr says nothing"
        return Check("slurmdbd", UNREACHABLE, f"does not answer: {why}", hint)
    names = done.stdout.decode("utf-8", "replace").split()
    return Check("slurmdbd", OK, f"answers; clusters: {', '.join(names) or '(none)'}")
