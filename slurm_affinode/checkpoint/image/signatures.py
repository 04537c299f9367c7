"""Keys of nodes, derived from the key of the cluster, and the signed small files beside the shared store.

    key of a node for a purpose = HMAC-SHA256(key of the cluster, "slurm-affinode key" 0 PURPOSE 0 NODE)

A signature names the node that made it, and is valid for one purpose and one file name: a manifest cannot pass for a
note, nor the note of one job for that of another. It is a proof against a writer of the shared store without the key
(another machine that mounts the export, an administrator of the file server). It is none against root on a node: every
node has the key of the cluster and can derive the keys of all others, so the name in a signature reveals mistakes, not
attacks. HMAC cannot give more, since a key that verifies also signs.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_affinode.base.errors import AffinodeError

LOG = logging.getLogger("slurm_affinode.agent")
LARGEST = 64 << 10
"""Size limit of a signed file in bytes."""
SIGNER, SIGNATURE, NAME = "signed_by", "hmac", "name"
_LABEL = b"slurm-affinode key\0"
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_HEX = re.compile(r"[0-9a-f]{64}")
_MOST_REFUSED = 256


class SignatureError(AffinodeError):
    """A file beside the shared store was not signed by a node of this cluster."""

    def __init__(self, message: str, *, unsigned: bool = False) -> None:
        super().__init__(message)
        self.unsigned = unsigned
        """It has no signature at all, as files of releases that did not sign."""


def node_key(key: bytes, purpose: str, node: str) -> bytes:
    """Return the key of a node for a purpose. Raises ``ValueError`` if ``node`` is not a valid name."""
    if not _NODE.fullmatch(node):
        raise ValueError(f"{node!r:.60} is not the name of a node")
    return hmac.digest(key, _LABEL + purpose.encode() + b"\0" + node.encode(), "sha256")


def sign(key: bytes, purpose: str, node: str, data: bytes) -> str:
    """Return the signature of a node, in hexadecimal."""
    return hmac.new(node_key(key, purpose, node), data, hashlib.sha256).hexdigest()


def verify(key: bytes, purpose: str, node: str, data: bytes, signature: str) -> bool:
    """Return whether a node signed this data."""
    try:
        expected = sign(key, purpose, node, data)
    except ValueError:
        return False
    return bool(_HEX.fullmatch(signature)) and hmac.compare_digest(expected, signature)


class Signer:
    """Signs for this node, and verifies the signatures of others. Thread-safe."""

    def __init__(self, key: bytes, node: str) -> None:
        """``key``: of the cluster. ``node``: this node's name in Slurm."""
        self._key, self.node = key, node
        self._refused: dict[str, str] = {}
        """Rejected files. No lock: single operations of a dictionary are atomic, and the worst that can come of two
        threads at once is a line that is logged twice."""

    def encode(self, purpose: str, name: str, value: Mapping[str, Any]) -> str:
        """Return the text of a signed file called ``name``: one line of JSON."""
        whole = {**value, NAME: name, SIGNER: self.node}
        return json.dumps({**whole, SIGNATURE: sign(self._key, purpose, self.node, _canonical(whole))}) + "\n"

    def decode(self, purpose: str, name: str, data: bytes) -> dict[str, Any]:
        """Return the contents of a signed file. Raises ``SignatureError``."""
        try:
            value = json.loads(data, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise SignatureError("is not JSON") from None
        if not isinstance(value, dict):
            raise SignatureError("is not a JSON object", unsigned=True)
        signature, node = value.pop(SIGNATURE, None), value.get(SIGNER)
        if signature is None and node is None:
            raise SignatureError("is not signed", unsigned=True)
        if not isinstance(node, str) or not isinstance(signature, str):
            raise SignatureError("is not signed by a node")
        if not verify(self._key, purpose, node, _canonical(value), signature):
            raise SignatureError(f"was changed, or signed with another key than that of {node!r:.60}")
        if value.get(NAME) != name:
            raise SignatureError(f"was signed as {value.get(NAME)!r:.80}")
        return value

    def read(self, purpose: str, path: Path) -> dict[str, Any]:
        """Read a signed file. Raises ``OSError`` if it cannot be read, and ``SignatureError``."""
        return self.decode(purpose, path.name, read_bounded(path))

    def refuse(self, path: Path, why: object) -> None:
        """Record that a file was rejected, and log it once."""
        if self._refused.get(str(path)) == str(why) or len(self._refused) >= _MOST_REFUSED:
            return
        self._refused[str(path)] = str(why)
        LOG.warning("%s: %s; it is ignored", path, why)

    def accept(self, path: Path) -> None:
        """Forget a rejected file, which is valid now or gone."""
        self._refused.pop(str(path), None)

    def refused(self) -> Mapping[str, str]:
        """Return the rejected files: path -> reason."""
        return dict(self._refused)


def read_bounded(path: Path, most: int = LARGEST) -> bytes:
    """Return the contents of a regular file of this user, at most ``most`` bytes, without following a link.

    Raises ``OSError`` and ``SignatureError``.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a socket
            raise SignatureError("is not a regular file") from None
        raise
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise SignatureError("is not a file that root alone may write to")
        data = file.read(most + 1)
    if len(data) > most:
        raise SignatureError(f"has more than {most >> 10} KiB")
    return data


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")
