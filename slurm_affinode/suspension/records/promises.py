"""Promises: which pending job gets its GPUs from which node, so that two agents do not suspend jobs for the same one.

Agents decide independently, each with its own copy of the queue. Before an agent suspends a job in favor of a pending
one, it creates ``promises/CLUSTER.JOBID.TASK`` beside the images with ``link(2)``. The first agent wins; the others
choose another pending job. TASK counts the tasks of a pending array and is 0 for other jobs. A promise is withdrawn
with its suspension; otherwise it lasts until Slurm has had time to start the pending job. An expired promise (its agent
has died) does not count. Promises are signed (``checkpoint.image.signatures``); unsigned ones of older releases do not
count.
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

from slurm_affinode.base import json_values
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import write_text
from slurm_affinode.base.timeouts import FileSystemCalls
from slurm_affinode.checkpoint.image.signatures import SIGNER, Signer
from slurm_affinode.core.policy import Promise, Waiting
from slurm_affinode.suspension.records.shared_state import opened, read_signed

SETTLE_S = 60.0
"""Time for Slurm to start the pending job once the GPUs are free, and for other agents to learn of it."""
_PURPOSE = "promise"
_AHEAD = 10.0
"""A promise that lasts longer than this many times the longest suspension is invalid: clocks differ by less."""
_MOST_TASKS = 64
"""Tasks of an array that can have promises at the same time."""


@dataclass(frozen=True, slots=True)
class _StoredPromise:
    promise: Promise
    until: float
    """Seconds since the epoch."""
    under_way: int = 0
    """Suspensions in progress on this node that serve the promise. Not stored in the file."""


class Promises:
    """The promises of all nodes, as seen by this one. Thread-safe; ``known`` reads no file."""

    def __init__(
        self, root: Path | None, cluster: str, signer: Signer, *, lasts_s: float, now: Callable[[], float] = time.time
    ) -> None:
        """``root``: the directory beside the shared store; ``None``: there is none, and promises are not shared.

        ``lasts_s``: the longest duration of a suspension.
        """
        self._directory = None if root is None else root / "promises"
        self._cluster, self._node, self._signer = cluster, signer.node, signer
        self._ask = FileSystemCalls(root)
        self._lasts_s, self._now = lasts_s, now
        self._files = threading.Lock()
        self._all: dict[str, _StoredPromise] = {}
        """By file name. Replaced as a whole while ``_files`` is held."""

    def known(self) -> tuple[Promise, ...]:
        """Return the promises of other nodes as of the last ``refresh``, and the current ones of this node."""
        now = self._now()
        return tuple(grant.promise for grant in self._all.values() if grant.until > now)

    def refresh(self) -> None:
        """Read the promises of other nodes and drop expired ones. Never raises; unreadable promises are unknown."""
        with self._files:
            now = self._now()
            current = {
                name: value
                for name, value in self._all.items()
                if value.promise.node == self._node and value.until > now
            }
            if self._directory is not None:
                with contextlib.suppress(OSError):
                    current |= self._ask(partial(self._foreign_promises, self._directory, now, frozenset(current)))
            self._all = current

    def _foreign_promises(self, directory: Path, now: float, own_names: Collection[str]) -> dict[str, _StoredPromise]:
        other_files = {}
        with opened(directory) as place:
            for path in sorted(directory / path.name for path in place.glob(f"{self._cluster}.*")):
                stored = self._read(path)
                if stored is not None and stored.until > now and stored.promise.node != self._node:
                    other_files[path.name] = stored
                elif path.name not in own_names:
                    self._clear(place, path)
        return other_files

    def _clear(self, place: Path, path: Path) -> None:
        """Remove a promise that is expired, invalid, or made by an earlier agent on this node.

        Another node may replace it at any time, so it is moved aside, and moved back unless it is the file that was
        read. A descriptor is held meanwhile, so that no other file can have its inode number; it opens nothing
        (``O_PATH``), because other machines may write to the directory, which is open as ``place``.
        """
        named = place / path.name
        try:
            descriptor = os.open(named, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            stored = self._read(path)
            if stored is not None and stored.until > self._now() and stored.promise.node != self._node:
                return
            aside = place / f".{path.name}.{self._node}.old"
            named.rename(aside)
            if not os.path.samestat(aside.lstat(), os.fstat(descriptor)):
                with contextlib.suppress(FileExistsError):
                    os.link(aside, named, follow_symlinks=False)
            aside.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # another node has removed it
        finally:
            os.close(descriptor)

    def take(self, waiting: Waiting, gpus: int) -> str | None:
        """Promise ``gpus`` of this node to a pending job; return the name for ``leave``.

        ``None``: promises for it exist already. Raises ``AffinodeError`` if that cannot be determined.
        """
        with self._files:
            now = self._now()
            for task in range(min(waiting.tasks, _MOST_TASKS)):
                name = f"{self._cluster}.{waiting.job_id}.{task}"
                stored = self._all.get(name)
                granted = (
                    stored if stored is not None and stored.promise.node == self._node and stored.until > now else None
                )
                if granted is not None and granted.promise.gpus >= waiting.gpus:
                    continue  # that task is served
                held_gpus, under_way = (0, 0) if granted is None else (granted.promise.gpus, granted.under_way)
                promise = Promise(waiting.job_id, self._node, held_gpus + gpus)
                stored_promise = _StoredPromise(promise, now + self._lasts_s, under_way + 1)
                if granted is not None:
                    self._keep(name, stored_promise)
                elif not self._link(name, stored_promise):
                    continue
                self._all = {**self._all, name: stored_promise}
                return name
            return None

    def leave(self, name: str, gpus: int, *, freed: bool) -> None:
        """End a suspension made for a promise. ``freed``: its GPUs go to the pending job. Never raises."""
        with self._files:
            before = self._all.get(name)
            if before is None or before.promise.node != self._node:
                return
            remaining = before.under_way - 1
            promise = before.promise if freed else replace(before.promise, gpus=before.promise.gpus - gpus)
            until = before.until if remaining > 0 else self._now() + SETTLE_S
            if promise.gpus <= 0:
                self._drop(name)
                return
            stored = _StoredPromise(promise, until, remaining)
            self._all = {**self._all, name: stored}
            with contextlib.suppress(AffinodeError):
                self._keep(name, stored)

    def _drop(self, name: str) -> None:
        """Withdraw a promise."""
        self._all = {key: value for key, value in self._all.items() if key != name}
        if self._directory is not None:
            path = self._directory / name
            with contextlib.suppress(OSError):
                self._ask(lambda: _unlink(path))

    def _link(self, name: str, stored: _StoredPromise) -> bool:
        """Create the file; ``False``: another node has created it."""
        if self._directory is None:
            return True
        path = self._directory / name
        try:
            own_result, foreign = self._ask(
                lambda: self._linked(path, stored), late=lambda result: _unlink(path) if result[0] else None
            )
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be written: {error.strerror or error}") from error
        if foreign is not None:
            self._all = {**self._all, name: foreign}
        return own_result

    def _linked(self, path: Path, stored: _StoredPromise) -> tuple[bool, _StoredPromise | None]:
        """Return whether the file was created, and otherwise the promise of another node found there, if readable."""
        with opened(path.parent, create=True) as place:
            self._clear(place, path)
            draft = place / f".{path.name}.{self._node}"
            write_text(draft, self._text(path, stored), mode=0o600)
            try:
                # A link appears whole or not at all, also for other clients of a network file system.
                os.link(draft, place / path.name)
            except FileExistsError:
                return False, self._read(path)
            finally:
                draft.unlink(missing_ok=True)
        return True, None

    def _keep(self, name: str, stored: _StoredPromise) -> None:
        if self._directory is None:
            return
        path = self._directory / name

        def put() -> None:
            with opened(path.parent, create=True) as place:
                write_text(place / path.name, self._text(path, stored), mode=0o600)

        try:
            self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be written: {error.strerror or error}") from error

    def _text(self, path: Path, stored: _StoredPromise) -> str:
        promise = stored.promise
        value = {"job": promise.job_id, "node": promise.node, "gpus": promise.gpus, "until": stored.until}
        return self._signer.encode(_PURPOSE, path.name, value)

    def _read(self, path: Path) -> _StoredPromise | None:
        """Return the promise in a file; ``None`` if there is none that its node has signed."""
        try:
            content = read_signed(self._signer, _PURPOSE, path)
            if content.value is None or not content.signed:
                return None
            value = content.value
            promise = Promise(int(value["job"]), str(value["node"]), int(value["gpus"]))
            until = json_values.number(value["until"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        if promise.node != value[SIGNER] or until > self._now() + _AHEAD * self._lasts_s:
            self._signer.refuse(path, "promises for another node, or for ever")
            return None
        return _StoredPromise(promise, until)


def _unlink(path: Path) -> None:
    with opened(path.parent) as place:
        (place / path.name).unlink(missing_ok=True)
