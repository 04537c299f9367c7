"""The list of a job's closed node-local files in its checkpoint image (``scratch.json``).

The contents of all of them are one file, ``scratch.data``: an image with thousands of files takes long to verify. The
list of a job that is tied to its node has the files that stay there, without contents.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from slurm_affinode.base import json_values
from slurm_affinode.base.node_config import is_below_root
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.checkpoint.user_files import MOST_ID

INDEX, DATA = "scratch.json", "scratch.data"
LIMIT = 16 << 20
"""Of the list, in bytes."""
_VERSION = 1
_MOST = (1 << 64) - 1
_KINDS = ("file", "directory", "fifo", "symlink", "link")


@dataclass(frozen=True, slots=True)
class ScratchFile:
    """A file, directory, link or named pipe below a node-local directory. It belongs to the user of the job."""

    place: str
    """The node-local directory."""
    path: str
    """Relative to it."""
    kind: str
    """``link``: another name of a file listed earlier; ``symlink``: a symbolic link."""
    mode: int
    gid: int
    mtime_ns: int
    inode: int
    device: int
    size: int = 0
    at: int = 0
    """Offset of its contents in ``scratch.data``."""
    target: str = ""
    """Of a symbolic link, as the link has it; of a link, the path of the other name in the same directory."""
    new: bool = True
    """``False``: a directory from before the job, with files of the job in it."""

    @property
    def full(self) -> str:
        """Absolute path."""
        return f"{self.place.rstrip('/')}/{self.path}"

    @property
    def identity(self) -> list[int]:
        """The values of ``local_files.identity_of`` when it was found."""
        return [self.device, self.inode, self.size, self.mtime_ns]


@dataclass(frozen=True, slots=True)
class ScratchIndex:
    """The contents of the list."""

    uid: int
    tied: str | None
    """Why the files stay on the node, or are lost; ``None``: they were copied."""
    files: tuple[ScratchFile, ...]
    """A directory comes before its entries, and a file before its other names."""
    version: int = _VERSION

    def encoded(self) -> bytes | None:
        """Return the list as it is stored; ``None`` if it would be longer than a restore accepts."""
        data = json.dumps(asdict(self)).encode()
        return data if len(data) <= LIMIT else None


def decoded(index: bytes, uid: int) -> ScratchIndex:
    """Return the list of an image. Raises ``RestoreFailed``, also if it is of another user than ``uid``."""
    try:
        decoded_index = _parsed(index)
        _check(decoded_index)
    except (ValueError, KeyError, TypeError) as error:
        raise RestoreFailed(f"the image's list of node-local files cannot be read: {error}") from None
    if decoded_index.uid != uid:
        raise RestoreFailed(f"the image's node-local files belong to user {decoded_index.uid}, not to user {uid}")
    return decoded_index


def _parsed(index: bytes) -> ScratchIndex:
    value = json_values.table(json_values.loads(index))
    if value.get("version", _VERSION) != _VERSION:
        raise ValueError("its version is unknown")
    return json_values.record(ScratchIndex, value)


def _check(index: ScratchIndex) -> None:
    """Raise ``ValueError`` unless a suspension has written the list."""
    json_values.whole(index.uid, MOST_ID)
    places: set[tuple[str, str]] = set()
    for file in index.files:
        _check_file(file, places)


def _check_file(file: ScratchFile, places: set[tuple[str, str]]) -> None:
    """Raise ``ValueError`` unless the file is one that a suspension lists. ``places``: the regular files before it."""
    text = file.place + file.path + file.target
    os.fsencode(text)  # UnicodeEncodeError for a lone surrogate, which JSON allows
    for number in (abs(file.mtime_ns), file.inode, file.device, file.size, file.at):
        json_values.whole(number, _MOST)
    json_values.whole(file.mode, 0o7777)
    json_values.whole(file.gid, MOST_ID)
    if "\0" in text or file.kind not in _KINDS or not is_below_root(file.place):
        raise ValueError(f"{file.path!r:.60} is a {file.kind!r:.20} in {file.place!r:.60}")
    if not set(file.path.split("/")).isdisjoint(("", ".", "..")):
        raise ValueError(f"{file.path!r:.60} is not a path below a directory")
    if file.kind == "link" and (file.place, file.target) not in places:
        raise ValueError(f"{file.path!r:.60} is not another name of a file listed before it")
    if file.kind == "file":
        places.add((file.place, file.path))
