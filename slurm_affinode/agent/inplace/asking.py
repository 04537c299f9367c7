"""Whether somebody asks something of a job, judged from what waits on its sockets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slurm_affinode.agent.inplace.sockdiag import Sock
from slurm_affinode.core.spans import span

Look = Mapping[int, Sock]
"""Inode -> socket, of one job, at a moment."""
_ANSWERED_S = 30.0
"""The least time that a server is given to answer, without its GPU and however short its idle window: nobody would wake
it for a request that it has read already."""
_OF_THE_DRIVER = b"\0cuda-uvmfd-"
"""So begins the name (``@cuda-uvmfd-NAMESPACE-PID``) of the socket on which CUDA listens in each of its processes, for
those that it shares memory with. No request comes there, and a job that has no other socket cannot be asked."""


def at_rest(now: Look, earlier: Look, *, within_s: float) -> str | None:
    """Why a running job must not be put to sleep now; ``None``: nobody waits for it.

    A request that was read and not answered leaves no trace in a queue: so a connection on which something came
    ``within_s`` ago (the idle window; on one that was made to the job at least half a minute), and nothing went out
    after that, counts as one. Bytes that stood there unread at an ``earlier`` look as well are none that the job is
    about to read, unless they came within that time, too.
    """
    ports = {sock.port for sock in now.values() if sock.listens and sock.family == "tcp"}
    read_unseen = uncounted(now)
    for sock in _from_others(now):
        before = earlier.get(sock.inode)
        if sock.listens:
            if sock.waiting:
                return f"a connection waits{_where(sock)}"
            continue
        if before is None and sock.inode in read_unseen:
            return f"a connection was made{_where(sock)}"
        came = sock.received_ms
        recent = came is not None and came < within_s * 1000
        fresh = before is None or before.unread != sock.unread or recent
        if sock.unread > 0 and fresh:
            return f"bytes wait on a connection{_where(sock)}"
        waits_s = max(within_s, _ANSWERED_S) if sock.port in ports else within_s
        if came is not None and came < waits_s * 1000 and _unanswered(sock):
            return f"what came {span(came / 1000)} ago{_where(sock)} has not been answered"
    return None


def _unanswered(sock: Sock) -> bool:
    """Something came, and nothing went out after that.

    The kernel's clock for both is coarse (up to 10 ms), and begins for both when a connection is made.
    """
    if not sock.received or sock.received_ms is None or sock.sent_ms is None:
        return False
    return sock.received_ms < sock.sent_ms or sock.sent == 0


def meanwhile(before: Look, after: Look) -> str | None:
    """What came for the job from the look ``before`` its locks until it was frozen; ``None``: nothing.

    It may have been read by then, and its answer wait for the GPU: so all that came counts, and not only what waits.
    """
    for sock in _from_others(after):
        known = before.get(sock.inode)
        if sock.listens:
            if sock.waiting:
                return f"a connection waits{_where(sock)}"
        elif known is None:
            return f"a connection was made{_where(sock)}"
        elif sock.unread > max(0, known.unread):
            return f"bytes wait on a connection{_where(sock)}"
        elif sock.received - known.received > (sock.state != known.state):  # the end of a stream counts as a byte
            return f"something came{_where(sock)}"
    return None


def uncounted(look: Look) -> frozenset[int]:
    """Connections to the job on which bytes may come and be read unnoticed: UNIX sockets do not count them."""
    names = {sock.name for sock in look.values() if sock.listens and sock.name}
    return frozenset(sock.inode for sock in _from_others(look) if sock.there and sock.name in names)


def can_be(look: Look) -> bool:
    """Whether somebody outside of the job can ask something of it by one of these sockets.

    UNIX sockets without a name are those of a client, or none that anybody can reach: most programs have one, as the C
    library keeps its connection to the daemon that knows the users (sssd, nscd).
    """
    return any(sock.family == "tcp" or bool(sock.name) for sock in _from_others(look))


def _from_others(look: Look) -> Iterator[Sock]:
    """Without the connections that have both ends in the job: what its own processes say to each other asks nothing.

    Nor does what comes to CUDA itself.
    """
    ends = {(sock.here, sock.there) for sock in look.values() if sock.there}
    return (
        sock
        for sock in look.values()
        if (sock.there, sock.here) not in ends and not sock.name.startswith(_OF_THE_DRIVER)
    )


def _where(sock: Sock) -> str:
    return f" on port {sock.port}" if sock.family == "tcp" else " on a UNIX socket"
