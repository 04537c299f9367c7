"""The sockets of jobs, looked at: which they are, and how they stand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slurm_affinode.agent.inplace.asking import Look, uncounted
from slurm_affinode.agent.inplace.sockdiag import NetSpace, Sock, SockDiag, SockDiagError, socket_inodes
from slurm_affinode.agent.inplace.threads import Waits, waits, went_on
from slurm_affinode.pinned import PROC, processes


@dataclass(frozen=True, slots=True)
class Own:
    """The sockets of a job, and the network namespaces that they may be in.

    A socket is in the namespace in which it was made, whoever has it now: a server in a container may have been handed
    a listener of the node. So each is looked for in the namespaces of all processes, and in the agent's own.
    """

    spaces: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Inode of the namespace -> inodes of sockets that may be there."""
    held: Mapping[int, NetSpace] = field(default_factory=dict)
    """Inode of the namespace -> the namespace."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(self.spaces.values())


class Diag(Protocol):
    """What is used of ``sockdiag.SockDiag``, which documents it."""

    def dump(
        self, wanted: frozenset[int] | None = None, families: Collection[str] = ("tcp", "unix")
    ) -> dict[int, Sock]:
        """See ``SockDiag``."""
        ...

    def close(self) -> None:
        """See ``SockDiag``."""
        ...


class Sockets(Protocol):
    """What the suspension in place asks of the network."""

    def own(self, pids: Iterable[int]) -> Own:
        """The sockets of these processes."""
        ...

    def look(self, own: Own) -> Look:
        """How they stand now. Raises ``SockDiagError``. May be called by any thread."""
        ...

    def looks(self, owners: Mapping[int, Own]) -> Mapping[int, Look]:
        """The same for several jobs, with one question for each namespace. For one thread.

        Jobs of a namespace that does not answer are left out.
        """
        ...

    def readers(self, pids: Iterable[int], look: Look) -> tuple[int, ...]:
        """Those of these processes that may read what nothing counts: they have a UNIX connection to the job."""
        ...

    def waits(self, pids: Iterable[int]) -> Waits:
        """Where the threads of these processes wait."""
        ...


class NodeSockets:
    """``Sockets`` of this machine."""

    def __init__(
        self, *, open_diag: Callable[[NetSpace], Diag] = SockDiag, proc: Path = PROC,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """``warn`` is told, once, of a namespace that does not answer."""
        self._open = open_diag
        self._proc = proc
        self._warn = warn
        self._kept: dict[int, Diag] = {}
        self._silent: set[int] = set()
        self._families: dict[int, tuple[frozenset[int], tuple[str, ...]]] = {}
        """Namespace -> the sockets that were asked for last, and their families."""

    def own(self, pids: Iterable[int]) -> Own:
        """See ``Sockets``."""
        inodes: set[int] = set()
        held: dict[int, NetSpace] = {}
        for process in processes(pids, proc=self._proc):
            with contextlib.suppress(OSError):
                space = NetSpace.of(process)
                held.setdefault(space.inode, space)
                inodes |= socket_inodes(process)
        if held:
            with contextlib.suppress(OSError):
                space = NetSpace.own()
                held.setdefault(space.inode, space)
        return Own(dict.fromkeys(held, frozenset(inodes)), held)

    def look(self, own: Own) -> Look:
        """See ``Sockets``."""
        found: dict[int, Sock] = {}
        for space, inodes in own.spaces.items():
            if inodes:
                diag = self._open(own.held[space])
                try:
                    found.update(diag.dump(inodes))
                finally:
                    diag.close()
        return found

    def looks(self, owners: Mapping[int, Own]) -> Mapping[int, Look]:
        """See ``Sockets``."""
        places = {space: own.held[space] for own in owners.values() for space, inodes in own.spaces.items() if inodes}
        for space in self._kept.keys() - places.keys():  # or it would keep the namespace of a job that has ended
            self._kept.pop(space).close()
            self._families.pop(space, None)
        wanted = {
            space: frozenset().union(*(own.spaces.get(space, frozenset()) for own in owners.values()))
            for space in places
        }
        dumps = {space: self._dump(held, wanted[space]) for space, held in places.items()}
        found: dict[int, Look] = {}
        for job_id, own in owners.items():
            seen: dict[int, Sock] = {}
            for space, inodes in own.spaces.items():
                dump = dumps.get(space)
                if inodes and dump is None:
                    break
                seen.update(_of(dump or {}, inodes))
            else:
                found[job_id] = seen
        return found

    def readers(self, pids: Iterable[int], look: Look) -> tuple[int, ...]:
        """See ``Sockets``."""
        inodes = uncounted(look)
        if not inodes:
            return ()
        return tuple(one.pid for one in processes(pids, proc=self._proc) if inodes & socket_inodes(one))

    def waits(self, pids: Iterable[int]) -> Waits:
        """See ``Sockets``."""
        return waits(pids, self._proc)

    def _dump(self, held: NetSpace, wanted: frozenset[int]) -> dict[int, Sock] | None:
        space = held.inode
        try:
            diag = self._kept.get(space)
            if diag is None:
                diag = self._kept[space] = self._open(held)
            # What sleeps opens no sockets: which kinds of them it has is found out once.
            before, families = self._families.get(space, (frozenset(), ()))
            if before == wanted:
                found = diag.dump(wanted, families)
            else:
                found = diag.dump(wanted)
                self._families[space] = wanted, _kinds(found.values())
        except SockDiagError as error:
            if (kept := self._kept.pop(space, None)) is not None:
                kept.close()
            if space not in self._silent:
                self._silent.add(space)
                self._warn(f"what waits on the sockets of sleeping jobs is not known: {error}")
            return None
        self._silent.discard(space)
        return found

    def close(self) -> None:
        """Let everything go."""
        for diag in self._kept.values():
            diag.close()
        self._kept.clear()


def _kinds(socks: Iterable[Sock]) -> tuple[str, ...]:
    """What ``SockDiag.dump`` has to be asked for to see these again."""
    seen = {"unix" if one.family == "unix" else "listen" if one.listens else "tcp" for one in socks}
    return tuple(sorted(seen - {"listen"} if "tcp" in seen else seen))


def _of(dump: Mapping[int, Sock], inodes: frozenset[int]) -> Look:
    return {inode: dump[inode] for inode in inodes if inode in dump}


def unnoticed(sockets: Sockets, facts: Mapping[str, Any]) -> str | None:
    """What may have been read that nothing counts since a suspension with these ``facts`` began; ``None``: nothing.

    Of a job that is frozen: one of its threads may else be elsewhere for a moment, and come back.
    """
    before = {int(thread): str(place) for thread, place in facts.get("waits", {}).items()}
    if before and went_on(before, sockets.waits(facts["readers"])):
        return "something may have been read on a UNIX socket"
    return None


def noted(look: Look) -> dict[str, list[object]]:
    """A look as it stands in the journal."""
    return {
        str(sock.inode): [sock.family, sock.state, sock.waiting, sock.port, sock.received] for sock in look.values()
    }


def from_note(note: Mapping[str, list[object]]) -> Look:
    """A look from the journal; what cannot be read of it is as if it had not been there."""
    found: dict[int, Sock] = {}
    for inode, (family, *rest) in note.items():
        state, waiting, port, received = (int(str(one)) for one in rest)
        found[int(inode)] = Sock(int(inode), str(family), state, waiting, port, received)
    return found
