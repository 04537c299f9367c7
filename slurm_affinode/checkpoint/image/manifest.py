"""``manifest.json`` of a checkpoint image and its ``manifest.hmac``: written once, trusted only if the HMAC matches.

The HMAC (SHA-256) covers the bytes of the manifest, and the manifest has the digest of every file: without the key,
write access to the store is not enough to make an image that would be restored. ``manifest.hmac`` is ``NODE HMAC``,
made with the key of the node (``signatures``) that made the image. Older releases wrote only the HMAC, made with the
key of the cluster; their images stay readable.
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

from slurm_affinode.base import json_values
from slurm_affinode.checkpoint.image import signatures
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
"""Ignored keys of older manifests of this schema: CRIU's image records which processes were stopped."""


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    return (json.dumps(_plain(manifest), indent=1, sort_keys=True) + "\n").encode()


def sign(data: bytes, key: bytes, node: str) -> str:
    """Return the text of ``manifest.hmac`` for a manifest's bytes. ``key``: of the cluster; ``node``: this one."""
    return f"{node} {signatures.sign(key, _PURPOSE, node, data)}"


def former_signature(data: bytes, key: bytes) -> str:
    """Return the HMAC in the format of releases without keys of nodes."""
    return hmac.new(key, _FORMER_LABEL + data, hashlib.sha256).hexdigest()


def signer(signature: bytes) -> str | None:
    """Return the node named in a signature, or ``None`` if an older release made it."""
    parts = signature.split()
    return parts[0].decode("ascii", "replace") if len(parts) == _PARTS else None


def decode(data: bytes, signature: bytes, key: bytes) -> Manifest:
    """Return a manifest after checking its signature. ``key``: of the cluster. Raises ``ImageDamaged``."""
    node = signer(signature)
    if node is None:
        right = hmac.compare_digest(former_signature(data, key).encode(), signature.strip())
    else:
        right = signatures.verify(key, _PURPOSE, node, data, signature.split()[1].decode("ascii", "replace"))
    if not right:
        raise ImageDamaged("the manifest was changed, or signed with another key")
    try:
        value = json_values.table(json_values.loads(data))
        if value.get("schema") != SCHEMA:
            raise ImageDamaged(f"the manifest has schema {value.get('schema')}, this release reads {SCHEMA}")
        manifest: Manifest = built(
            Manifest, {key: field_value for key, field_value in value.items() if key not in _FORMER}
        )
        _check(manifest, node)
    except ValueError as error:
        raise ImageDamaged(f"the manifest cannot be read: {error}") from None
    return manifest


def _check(manifest: Manifest, node: str | None) -> None:
    """Check a manifest signed by ``node`` for values that no release writes. Raises ``ValueError``."""
    if node is not None and node != manifest.node:
        raise ValueError(f"it names {manifest.node!r:.60}, but {node!r:.60} has signed it")
    if not all(0 <= epoch < _YEAR_10000 for epoch in (manifest.started_epoch, manifest.dumped_epoch)):
        raise ValueError("its times are not finite")
    numbers = (manifest.seq, manifest.uid, manifest.gid, manifest.restarts, manifest.gpu_bytes)
    if not all(0 <= number < 1 << 63 for number in (*numbers, *(file.size for file in manifest.files))):
        raise ValueError("it has numbers below 0, or far too large")
    paths = [file.path for file in manifest.files]
    invalid = next(
        (path for path in paths if not _PATH.fullmatch(path) or path.rpartition("/")[2] in (".", "..")), None
    )
    if invalid is not None or len(set(paths)) < len(paths):
        raise ValueError(
            "a file is listed twice" if invalid is None else f"{invalid!r:.60} is not the name of a file in it"
        )


def load_key(path: Path = KEY_PATH, *, owner: int = 0) -> bytes:
    """Return the key of all checkpoint images from a file that only ``owner`` may access, of at least 32 bytes.

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
                f"{path}: the key of images must be a file of user {owner} that no other user can read",
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
    """Return a dataclass of ``kind`` from plain JSON values. Raises ``ValueError``."""
    return json_values.record(kind, value, parsers={SuspendOption: SuspendOption.parse})


def summary(manifest: Manifest) -> Mapping[str, Any]:
    """Return a summary of a checkpoint image, without its list of files."""
    plain = dict(_plain(manifest))
    plain["files"] = len(manifest.files)
    plain["size"] = manifest.size
    return plain
