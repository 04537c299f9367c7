"""The protocol between a job's shepherd and the agent: one message per packet of a ``SOCK_SEQPACKET`` socket.

A message is text: its verb, then one ``key=value`` per line without escapes, so that a few lines of C can write and
read it. Values contain no control characters; text from users is cleaned before it is sent. Everything received comes
from a process that a user may control: its size is limited, and it is not trusted to identify itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_affinode.base.text import one_line
from slurm_affinode.model.suspension import SuspendOption

PROTOCOL_VERSION = 1
MAX_PACKET_BYTES = 4096
MAX_TEXT_BYTES = 512
"""Limit for a line on the job's standard error, and for a reason."""
_MAX_PID = 1 << 22
_KEY = re.compile(r"[a-z_]{1,32}")
_NUMBER = re.compile(r"[0-9]{1,10}")


class BadMessage(ValueError):  # noqa: N818 - it is the message that is bad
    """A packet is not a valid message. The text states the reason, for the log."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection, also after a reconnect. It carries three descriptors."""

    job_id: int
    """The ID that the shepherd sends; the agent determines it from the kernel and refuses if they differ."""
    restarts: int
    image: bool
    """The plugin has found an image of this job in a store: the script must not start before the agent replies."""
    root: int
    """PID of the tree's root in the job's PID namespace; 0: nothing was started yet."""
    option: SuspendOption


@dataclass(frozen=True, slots=True)
class Started:
    """The script runs; ``root`` is its PID in the job's PID namespace."""

    root: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The tree's root has ended; ``status`` is the result of ``wait``."""

    status: int


@dataclass(frozen=True, slots=True)
class Reaped:
    """A process has ended before the shepherd got a reply: perhaps the root of a tree that was just restored.

    Sent only after a ``Wait``, which an agent that does not know this message sends differently.
    """

    pid: int
    """In the job's PID namespace."""
    status: int
    """The result of ``wait``."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """Slurm has sent a signal to the job. Sent only for jobs with ``mode=inplace``, which may be stopped."""

    number: int


Incoming = Hello | Started | Reaped | Exited | Signalled


@dataclass(frozen=True, slots=True)
class Start:
    """Start the script; ``restore_failed``: with ``SLURM_AFFINODE_RESTORE_FAILED=1`` in its environment."""

    restore_failed: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """The tree is restored; its root is ``pid`` in the namespace, a child of PID 1."""

    pid: int
    trouble: str | None = None
    """A problem with its image, for users."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The agent is still busy; ``fresh``: it waits for room to start the job, not for an image.

    Otherwise it asks for reports of processes that end (``Reaped``).
    """

    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Exit without starting anything: the job was held, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """One line for the job's standard error."""

    text: str


@dataclass(frozen=True, slots=True)
class SignalMessage:
    """Send a signal to the process group of the script."""

    number: int


Reply = Start | Restored | Hold
"""The reply to a ``Hello`` with ``root=0``; any number of ``Wait`` may precede it."""
Outgoing = Reply | Wait | Say | SignalMessage


def decode(packet: bytes) -> Incoming:
    """Decode a packet from a shepherd. Raises ``BadMessage``."""
    if len(packet) > MAX_PACKET_BYTES:
        raise BadMessage(f"a packet of {len(packet)} bytes is longer than {MAX_PACKET_BYTES}")
    verb, fields = _split(packet)
    if verb == "hello":
        return _hello(fields)
    if verb == "started":
        return Started(_number(fields, "root", 1, _MAX_PID))
    if verb == "signalled":
        return Signalled(_number(fields, "number", 1, 64))
    if verb == "reaped":
        return Reaped(_number(fields, "pid", 1, _MAX_PID), _number(fields, "status", 0, 0xFFFF))
    if verb == "exit":
        return Exited(_number(fields, "status", 0, 0xFFFF))
    raise BadMessage(f"no such verb: {verb!r}")


def encode(message: Outgoing) -> bytes:
    """Encode a message to a shepherd."""
    match message:
        case Start(restore_failed):
            return b"start\nrestore_failed=1" if restore_failed else b"start"
        case Restored(pid=pid):
            return f"restored\npid={pid}".encode()
        case Wait(fresh):
            return b"wait\nfresh=1" if fresh else b"wait\nreports=1"
        case Hold(reason):
            return b"hold\nreason=" + one_line(reason, MAX_TEXT_BYTES).encode()
        case Say(text):
            return b"say\ntext=" + one_line(text, MAX_TEXT_BYTES).encode()
        case SignalMessage(number):
            return f"signal\nnumber={number}".encode()


def _hello(fields: Mapping[str, str]) -> Hello:
    version = _number(fields, "version", 0, 1000)
    if version != PROTOCOL_VERSION:
        raise BadMessage(f"version {version} of the protocol; this agent speaks {PROTOCOL_VERSION}")
    try:
        option = SuspendOption.parse(fields.get("option", ""))
    except ValueError as error:
        raise BadMessage(str(error)) from None
    return Hello(
        job_id=_number(fields, "job", 1, 0xFFFFFFFF),
        restarts=_number(fields, "restarts", 0, 0xFFFFFFFF),
        image=bool(_number(fields, "image", 0, 1)),
        root=_number(fields, "root", 0, _MAX_PID),
        option=option,
    )


def _split(packet: bytes) -> tuple[str, Mapping[str, str]]:
    try:
        text = packet.decode("utf-8")
    except UnicodeDecodeError:
        raise BadMessage("it is not UTF-8") from None
    verb, *lines = text.removesuffix("\n").split("\n")
    if not _KEY.fullmatch(verb):
        raise BadMessage("it does not begin with a verb")
    fields: dict[str, str] = {}
    for line in lines:
        key, equals, value = line.partition("=")
        if not equals or not _KEY.fullmatch(key) or key in fields:
            raise BadMessage(f"{verb}: a line is not key=value, or repeats a key")
        if value and not value.isprintable():
            raise BadMessage(f"{verb}: {key} holds control characters")
        fields[key] = value
    return verb, fields


def _number(fields: Mapping[str, str], key: str, least: int, most: int) -> int:
    text = fields.get(key)
    if text is None or not (text.isascii() and _NUMBER.fullmatch(text)) or not least <= int(text) <= most:
        raise BadMessage(f"{key}={text!r} is not a number from {least} to {most}")
    return int(text)
