"""Which pending job gets its GPUs from which node: beside the images, so that two agents do not serve the same one.

Agents decide by themselves, each on its own copy of the queue. Before one suspends a job because another one waits, it
makes the file ``promises/CLUSTER.JOBID.TASK`` with ``link(2)``: the first has it, the others see it and look for
another pending job. TASK counts the tasks of a pending array, and is 0 for other jobs. A promise is withdrawn when
its suspension is, and otherwise stands for a while after it, until Slurm has started the pending job. One whose time
is over, as its agent died, binds nobody. Should two agents take over such a one in the same moment, one job too many
is suspended, which ``wake=auto`` puts right. Promises are signed (``checkpoint.nodekeys``); one that is not, as those
of older releases, binds nobody.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurm_affinode import jsonvalues
from slurm_affinode.agent.notes import read_signed
from slurm_affinode.checkpoint.nodekeys import SIGNER, Signer
from slurm_affinode.core.policy import Promise, Waiting
from slurm_affinode.errors import AffinodeError
from slurm_affinode.files import write_text
from slurm_affinode.patience import Patience

SETTLE_S = 60.0
"""So long Slurm has, once the GPUs are free, to start the pending job; and other agents to hear of it."""
_PURPOSE = "promise"
_AHEAD = 10.0
"""A promise that is to last for more than so many times the longest suspension is none: clocks differ by less."""
_MOST_TASKS = 64
"""Of an array that have promises at the same time."""


@dataclass(frozen=True, slots=True)
class _Given:
    promise: Promise
    until: float
    """Seconds of the epoch."""
    under_way: int = 0
    """Suspensions of this node that are to keep it. Not in the file."""


class Promises:
    """Those of all nodes, as this one sees them. Thread-safe; ``known`` reads no file."""

    def __init__(
        self, root: Path | None, cluster: str, signer: Signer, *, lasts_s: float, now: Callable[[], float] = time.time
    ) -> None:
        """``root``: the directory beside the shared store; ``None``: there is none, and nobody to tell.

        ``lasts_s``: the longest that a suspension may take.
        """
        self._directory = None if root is None else root / "promises"
        self._cluster, self._node, self._signer = cluster, signer.node, signer
        self._ask = Patience(root)
        self._lasts_s, self._now = lasts_s, now
        self._files = threading.Lock()
        self._all: dict[str, _Given] = {}
        """By file name. Replaced as a whole, by whoever holds ``_files``."""

    def known(self) -> tuple[Promise, ...]:
        """Of all nodes, as they were when they were last looked at; this node's own as they are."""
        now = self._now()
        return tuple(one.promise for one in self._all.values() if one.until > now)

    def look(self) -> None:
        """See what other nodes have promised; what is over goes. Raises nothing: what cannot be read is not known."""
        with self._files:
            now = self._now()
            found = {name: one for name, one in self._all.items() if one.promise.node == self._node and one.until > now}
            if self._directory is not None:
                with contextlib.suppress(OSError):
                    found |= self._ask(partial(self._others, self._directory, now, frozenset(found)))
            self._all = found

    def _others(self, directory: Path, now: float, mine: Collection[str]) -> dict[str, _Given]:
        found = {}
        for path in sorted(directory.glob(f"{self._cluster}.*")):
            given = self._read(path)
            if given is not None and given.until > now and given.promise.node != self._node:
                found[path.name] = given
            elif path.name not in mine:  # over, or of an agent that ran here before
                path.unlink(missing_ok=True)
        return found

    def take(self, waiting: Waiting, gpus: int) -> str | None:
        """Promise ``gpus`` of this node to a pending job; its name for ``leave``. ``None``: others have promised it.

        Raises ``AffinodeError`` where that cannot be found out.
        """
        with self._files:
            now = self._now()
            for task in range(min(waiting.tasks, _MOST_TASKS)):
                name = f"{self._cluster}.{waiting.job_id}.{task}"
                there = self._all.get(name)
                mine = there if there is not None and there.promise.node == self._node and there.until > now else None
                if mine is not None and mine.promise.gpus >= waiting.gpus:
                    continue  # that task is served
                held, under_way = (0, 0) if mine is None else (mine.promise.gpus, mine.under_way)
                promise = Promise(waiting.job_id, self._node, held + gpus)
                given = _Given(promise, now + self._lasts_s, under_way + 1)
                if mine is not None:
                    self._keep(name, given)
                elif not self._link(name, given):
                    continue
                self._all = {**self._all, name: given}
                return name
            return None

    def leave(self, name: str, gpus: int, *, freed: bool) -> None:
        """A suspension is over. ``freed``: its GPUs are on their way to the pending job. Raises nothing."""
        with self._files:
            before = self._all.get(name)
            if before is None or before.promise.node != self._node:
                return
            left = before.under_way - 1
            promise = before.promise if freed else replace(before.promise, gpus=before.promise.gpus - gpus)
            until = before.until if left > 0 else self._now() + SETTLE_S
            if promise.gpus <= 0:
                self._drop(name)
                return
            given = _Given(promise, until, left)
            self._all = {**self._all, name: given}
            with contextlib.suppress(AffinodeError):
                self._keep(name, given)

    def _drop(self, name: str) -> None:
        """Nothing is promised any more."""
        self._all = {other: one for other, one in self._all.items() if other != name}
        if self._directory is not None:
            path = self._directory / name
            with contextlib.suppress(OSError):
                self._ask(lambda: path.unlink(missing_ok=True))

    def _link(self, name: str, given: _Given) -> bool:
        """Make the file; ``False``: another node has it."""
        if self._directory is None:
            return True
        path = self._directory / name
        try:
            made, there = self._ask(
                lambda: self._linked(path, given), late=lambda found: path.unlink() if found[0] else None
            )
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be written: {error.strerror or error}") from error
        if there is not None:
            self._all = {**self._all, name: there}
        return made

    def _linked(self, path: Path, given: _Given) -> tuple[bool, _Given | None]:
        """Whether the file was made, and what another node has put there, as far as it can be read."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = self._read(path)
        if there is None or there.until <= self._now() or there.promise.node == self._node:
            path.unlink(missing_ok=True)  # over, of an agent that ran here before, or nobody's
        draft = path.with_name(f".{path.name}.{self._node}")
        draft.write_text(self._text(path, given), encoding="utf-8")
        try:
            # A link appears whole or not at all, also for other clients of a network file system.
            os.link(draft, path)
        except FileExistsError:
            return False, self._read(path)
        finally:
            draft.unlink(missing_ok=True)
        return True, None

    def _keep(self, name: str, given: _Given) -> None:
        if self._directory is None:
            return
        path = self._directory / name
        try:
            self._ask(lambda: write_text(path, self._text(path, given), mode=0o600))
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be written: {error.strerror or error}") from error

    def _text(self, path: Path, given: _Given) -> str:
        promise = given.promise
        value = {"job": promise.job_id, "node": promise.node, "gpus": promise.gpus, "until": given.until}
        return self._signer.encode(_PURPOSE, path.name, value)

    def _read(self, path: Path) -> _Given | None:
        """``None``: it is not there, or not one that its node has signed."""
        try:
            found = read_signed(self._signer, _PURPOSE, path)
            if found.value is None or not found.signed:
                return None
            value = found.value
            promise = Promise(int(value["job"]), str(value["node"]), int(value["gpus"]))
            until = jsonvalues.number(value["until"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        if promise.node != value[SIGNER] or until > self._now() + _AHEAD * self._lasts_s:
            self._signer.refuse(path, "promises for another node, or for ever")
            return None
        return _Given(promise, until)
