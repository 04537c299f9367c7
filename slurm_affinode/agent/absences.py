"""Jobs that have an image and that Slurm does not know: since when, as all agents agree on it.

Beside the shared store, root's alone and signed: ``unknown/CLUSTER.JOBID.json`` for each of these jobs, made when an
agent first sees that Slurm answers and does not know it, and removed when Slurm knows it again; and
``sweep-stopped.json`` while a sweep waits for an administrator (``core.removal``). Times are the file server's, read
from a file that was just written there: the clocks of the nodes may differ, and agents may restart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_affinode.agent.notes import read_signed
from slurm_affinode.checkpoint.entries import JOB
from slurm_affinode.checkpoint.nodekeys import Signer
from slurm_affinode.errors import AffinodeError
from slurm_affinode.files import write_text
from slurm_affinode.patience import Patience

_PURPOSE, _STOPPED = "unknown job", "stopped sweep"
_FORGOTTEN_S = 30 * 86400.0
"""A record of a job of which no agent has an image goes so long after its images could."""
_MOST_JOBS = 1000
"""Named in the record of a stopped sweep."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Absence:
    """A job that Slurm does not know."""

    since: float
    """When that was first seen: seconds of the epoch, by the clock of the file server."""
    age_s: float
    confirmed: bool
    """An administrator has said that its images may go."""
    due: bool
    """Its images may go."""


@dataclass(frozen=True, slots=True)
class StoppedSweep:
    """A sweep that would have removed most images of a store."""

    since: float
    node: str
    store: str
    going: int
    present: int
    jobs: tuple[str, ...]
    """``CLUSTER.JOBID`` of those whose images would have gone."""

    def __str__(self) -> str:
        """One line."""
        return (
            f"the sweep of images is stopped: Slurm does not know the jobs of {self.going} of {self.present} images in "
            f"{self.store}; nothing is removed until it does, or an administrator confirms that these jobs are over"
        )


STOPPED_HINT = (
    "has slurmctld lost its state? Restore it. To remove these images: slurm-affinode images prune --unknown --yes"
)


def server_time(directory: Path, node: str) -> float:
    """The time by the clock of the file system of a directory. Raises ``OSError``."""
    path = directory / f".clock.{node}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"now\n")
        os.fsync(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


class Absences:
    """Those of one cluster. May be used by several threads, and by several nodes."""

    def __init__(
        self, root: Path, signer: Signer, *, keep_s: float, clock: Callable[[Path, str], float] = server_time
    ) -> None:
        """``root``: the directory beside the shared store. ``keep_s``: so long images of unknown jobs are kept."""
        self._directory = root / "unknown"
        self._stop = root / "sweep-stopped.json"
        self._signer = signer
        self._keep_s = keep_s
        self._clock = clock
        self._ask = Patience(root)

    def update(self, known: Collection[str], unknown: Collection[str]) -> dict[str, Absence]:
        """Record which jobs (``CLUSTER.JOBID``) Slurm knows, and return an ``Absence`` for each unknown one.

        Raises ``AffinodeError`` where that cannot be noted: nothing may be removed then.
        """
        try:
            return self._ask(lambda: self._update(frozenset(known), unknown))
        except OSError as error:
            raise AffinodeError(f"{self._directory}: {error.strerror or error}") from error

    def _update(self, known: Collection[str], unknown: Collection[str]) -> dict[str, Absence]:
        there = self._read()
        if not there and not unknown:
            return {}
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = self._clock(self._directory, self._signer.node)
        for name, (since, _) in there.items():
            lost = name not in unknown and now - since > self._keep_s + _FORGOTTEN_S
            if name in known or lost:
                self._path(name).unlink(missing_ok=True)
        found = {}
        for name in unknown:
            since, confirmed = there.get(name, (now, False))
            since = min(since, now)  # the clock of the file server was set back
            if (since, confirmed) != there.get(name):
                self._write(name, since, confirmed=confirmed)
            found[name] = self._absence(since, now, confirmed=confirmed)
        return found

    def confirm(self, unknown: Collection[str]) -> None:
        """Note that an administrator lets the images of these jobs go. Raises ``AffinodeError``."""

        def put() -> None:
            there = self._read()
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            now = self._clock(self._directory, self._signer.node)
            for name in unknown:
                self._write(name, there.get(name, (now, False))[0], confirmed=True)
            self._stop.unlink(missing_ok=True)

        try:
            self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{self._directory}: {error.strerror or error}") from error

    def all(self) -> dict[str, Absence]:
        """Those that are noted now; none where they cannot be read."""

        def look() -> dict[str, Absence]:
            there = self._read()
            if not there:
                return {}
            now = self._clock(self._directory, self._signer.node)
            return {name: self._absence(since, now, confirmed=yes) for name, (since, yes) in there.items()}

        with contextlib.suppress(OSError):
            return self._ask(look)
        return {}

    def _absence(self, since: float, now: float, *, confirmed: bool) -> Absence:
        age_s = max(0.0, now - since)
        return Absence(since, age_s, confirmed, due=confirmed or age_s >= self._keep_s)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _write(self, name: str, since: float, *, confirmed: bool) -> None:
        path = self._path(name)
        value = {"since": since, "confirmed": confirmed}
        write_text(path, self._signer.encode(_PURPOSE, path.name, value), mode=0o600)

    def _read(self) -> dict[str, tuple[float, bool]]:
        """Name -> since when, and whether it is confirmed. What no node has signed is none, and written anew."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._directory.iterdir():
                if not JOB.fullmatch(path.stem) or path.suffix != ".json":
                    continue
                one = read_signed(self._signer, _PURPOSE, path)
                if one.value is None or not one.signed:
                    continue
                since = one.value.get("since")
                if isinstance(since, int | float) and 0 <= since < 1 << 40:
                    found[path.stem] = float(since), one.value.get("confirmed") is True
        return found

    # --- a sweep that has stopped

    def stopped(self) -> StoppedSweep | None:
        """The sweep that waits for an administrator. Raises ``AffinodeError`` where that cannot be read."""
        try:
            found = self._ask(lambda: read_signed(self._signer, _STOPPED, self._stop, most=_MOST_BYTES))
        except OSError as error:
            raise AffinodeError(f"{self._stop}: {error.strerror or error}") from error
        return None if found.value is None or not found.signed else _stopped_of(found.value)

    def stop(self, store: str, going: int, present: int, jobs: Collection[str]) -> StoppedSweep:
        """Note that a sweep has stopped. Raises ``AffinodeError``."""
        named = sorted(jobs)[:_MOST_JOBS]

        def put() -> float:
            now = self._clock(self._stop.parent, self._signer.node)
            value = {
                "since": now, "node": self._signer.node, "store": store, "going": going, "present": present,
                "jobs": named,
            }  # fmt: skip
            write_text(self._stop, self._signer.encode(_STOPPED, self._stop.name, value), mode=0o600)
            return now

        try:
            since = self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{self._stop}: {error.strerror or error}") from error
        return StoppedSweep(since, self._signer.node, store, going, present, tuple(named))

    def resume(self) -> None:
        """The reason is gone: Slurm knows the jobs again. Raises ``AffinodeError``."""
        try:
            self._ask(lambda: self._stop.unlink(missing_ok=True))
        except OSError as error:
            raise AffinodeError(f"{self._stop}: {error.strerror or error}") from error


def _stopped_of(value: Mapping[str, Any]) -> StoppedSweep | None:
    try:
        return StoppedSweep(
            float(value["since"]), str(value["node"]), str(value["store"]), int(value["going"]), int(value["present"]),
            tuple(str(name) for name in value["jobs"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
