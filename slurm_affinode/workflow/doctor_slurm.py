"""What ``doctor`` says of the live Slurm: how it is spoken to, its version, whether its daemons answer."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slurm_affinode import process
from slurm_affinode.errors import AffinodeError
from slurm_affinode.resources import asset_dir
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


_FILES = (
    "cron.d/slurm-affinode", "cron.d/slurm-affinode-zombies", "systemd/slurm-affinode-nightly.service",
    "systemd/slurm-affinode-zombies.service", "systemd/slurm-affinode-agent.service",
)  # fmt: skip
_PATH = re.compile(r'^(?:Environment=)?"?PATH=([^"\n]+)', re.MULTILINE)


def services(bin_dir: Path | None, etc: Path = Path("/etc")) -> Check:
    """Whether cron and the units find Slurm's commands: on the ``PATH`` of their files, not on that of the caller."""
    missing: dict[str, list[str]] = {}
    for file, places in _service_paths(etc):
        for command in process.SLURM_COMMANDS:
            if not _found(command, [*([] if bin_dir is None else [str(bin_dir)]), *places.split(":")]):
                missing.setdefault(command, []).append(file.name)
    if not missing:
        return Check("services", OK, "Slurm's commands are found with the PATH of the services")
    files = sorted({file for found in missing.values() for file in found})
    detail = f"not found with the PATH of {', '.join(files)}: {', '.join(missing)}"
    here = next((Path(found) for command in missing if (found := shutil.which(command))), None)
    if here is not None and (loose := process.replaceable(here)) is not None:
        return Check("services", PROBLEM, detail, f"root does not run {here}: others may write to {loose}")
    if here is not None:
        return Check("services", PROBLEM, detail, f'set slurm.bin_dir = "{here.parent}" in the configuration')
    hint = "set slurm.bin_dir in the configuration to the directory that has them"
    return Check("services", SKIPPED if bin_dir is None else PROBLEM, detail, hint)


def _service_paths(etc: Path) -> Iterator[tuple[Path, str]]:
    """Each file of a service that is installed (none: those that ship), with its ``PATH``."""
    places = [etc / name.replace("systemd/", "systemd/system/") for name in _FILES]
    installed = [place for place in places if place.is_file()]
    for file in installed or [asset_dir("reports") / name for name in _FILES]:
        texts = [one.read_text(encoding="utf-8", errors="replace") for one in (file, *_drop_ins(file))]
        found = [path for text in texts for path in _PATH.findall(text)]
        yield file, found[-1].strip() if found else "/usr/bin:/bin"


def _drop_ins(file: Path) -> list[Path]:
    return sorted(file.with_name(f"{file.name}.d").glob("*.conf"))


def _found(command: str, places: Sequence[str]) -> bool:
    """Whether root, too, would run a program of that name in one of the directories."""
    for place in places:
        with contextlib.suppress(OSError):
            path = Path(place) / command
            if os.access(path, os.X_OK) and process.replaceable(path) is None:
                return True
    return False


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
