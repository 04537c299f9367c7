"""``manifest.json`` of an image and its ``manifest.hmac``: written once, trusted only where the HMAC is right.

The HMAC (SHA-256) is over the bytes of the manifest, and the manifest has the digest of every file: whoever can write
to the store but does not have the key cannot make an image that is restored. ``manifest.hmac`` is ``NODE HMAC``, made
with the key of the node (``nodekeys``) that made the image. Older releases wrote the HMAC alone, made with the key of
the cluster; their images stay readable.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from slurm_affinode import jsonvalues
from slurm_affinode.checkpoint import nodekeys
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged
from slurm_affinode.model.suspension import Manifest, SuspendOption

SCHEMA = 1
KEY_PATH = Path("/etc/slurm-affinode/image.key")
_PURPOSE = "image manifest"
_FORMER_LABEL = b"slurm-affinode image manifest\0"
_PARTS = 2
_KEY_BYTES = 32
_KEY_LIMIT = 4096
_YEAR_10000 = 253_402_300_800
_PATH = re.compile(r"(criu/)?[^/\0\ud800-\udfff]{1,255}")
_FORMER = ("stopped_pids",)
"""Keys of older manifests of this schema, which nobody reads: what was stopped is so in CRIU's image."""


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``."""
    return (json.dumps(_plain(manifest), indent=1, sort_keys=True) + "\n").encode()


def sign(data: bytes, key: bytes, node: str) -> str:
    """The text of ``manifest.hmac`` for a manifest's bytes. ``key``: of the cluster; ``node``: this one."""
    return f"{node} {nodekeys.sign(key, _PURPOSE, node, data)}"


def former_signature(data: bytes, key: bytes) -> str:
    """The same as releases without keys of nodes wrote it."""
    return hmac.new(key, _FORMER_LABEL + data, hashlib.sha256).hexdigest()


def signer(signature: bytes) -> str | None:
    """The node that a signature names; ``None``: it is of a release that named none."""
    parts = signature.split()
    return parts[0].decode("ascii", "replace") if len(parts) == _PARTS else None


def decode(data: bytes, signature: bytes, key: bytes) -> Manifest:
    """A manifest, where its signature is right. ``key``: of the cluster. Raises ``ImageDamaged``."""
    node = signer(signature)
    if node is None:
        right = hmac.compare_digest(former_signature(data, key).encode(), signature.strip())
    else:
        right = nodekeys.verify(key, _PURPOSE, node, data, signature.split()[1].decode("ascii", "replace"))
    if not right:
        raise ImageDamaged("the manifest was changed, or signed with another key")
    try:
        value = jsonvalues.table(jsonvalues.loads(data))
        if value.get("schema") != SCHEMA:
            raise ImageDamaged(f"the manifest has schema {value.get('schema')}, this release reads {SCHEMA}")
        manifest: Manifest = built(Manifest, {key: one for key, one in value.items() if key not in _FORMER})
        _check(manifest, node)
    except ValueError as error:
        raise ImageDamaged(f"the manifest cannot be read: {error}") from None
    return manifest


def _check(manifest: Manifest, node: str | None) -> None:
    """What nobody writes, although it is signed (by ``node``). Raises ``ValueError``."""
    if node is not None and node != manifest.node:
        raise ValueError(f"it is of {manifest.node!r:.60}, and {node!r:.60} has signed it")
    if not all(0 <= one < _YEAR_10000 for one in (manifest.started_epoch, manifest.dumped_epoch)):
        raise ValueError("its times are none")
    numbers = (manifest.seq, manifest.uid, manifest.gid, manifest.restarts, manifest.gpu_bytes)
    if not all(0 <= one < 1 << 63 for one in (*numbers, *(file.size for file in manifest.files))):
        raise ValueError("it has numbers below 0, or far too large")
    paths = [file.path for file in manifest.files]
    odd = next((path for path in paths if not _PATH.fullmatch(path) or path.rpartition("/")[2] in (".", "..")), None)
    if odd is not None or len(set(paths)) < len(paths):
        raise ValueError("a file is listed twice" if odd is None else f"{odd!r:.60} is not the name of a file in it")


def load_key(path: Path = KEY_PATH, *, owner: int = 0) -> bytes:
    """The key of all images: a file of ``owner``, closed to everybody else, of at least 32 bytes.

    Raises ``CheckpointError``.
    """
    hint = f"make one for all nodes: (umask 077; head -c 64 /dev/urandom >{path})"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: the key of images cannot be read: {error.strerror}", hint=hint) from None
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner or facts.st_mode & 0o077:
            raise CheckpointError(
                f"{path}: the key of images must be a file of user {owner} that nobody else can read",
                hint=f"chown {owner} {path} && chmod 0400 {path}",
            )
        key = file.read(_KEY_LIMIT)
    if len(key) < _KEY_BYTES:
        raise CheckpointError(f"{path}: the key of images has {len(key)} bytes, {_KEY_BYTES} are needed", hint=hint)
    return key


def _plain(value: Any) -> Any:
    if isinstance(value, SuspendOption):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value


def built(kind: Any, value: Any) -> Any:
    """A dataclass of ``kind`` made of plain JSON. Raises ``ValueError``."""
    return jsonvalues.record(kind, value, parsers={SuspendOption: SuspendOption.parse})


def summary(manifest: Manifest) -> Mapping[str, Any]:
    """What a person or a program wants to know of an image, without its list of files."""
    plain = dict(_plain(manifest))
    plain["files"] = len(manifest.files)
    plain["size"] = manifest.size
    return plain
