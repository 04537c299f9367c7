"""Device files of the NVIDIA driver in forked workers, and the CRIU plugin that lets a dump pass over them.

A child of ``fork(2)`` inherits descriptors and mappings of ``/dev/nvidia*`` from a parent that uses CUDA, and cannot
use them, because CUDA does not survive a fork. The driver closes them in the parent when that is checkpointed, but not
in its children, and CRIU dumps such files only with a plugin (``spank/criu_device_files.c``). A restore replaces the
descriptors with ``/dev/null`` and the mappings with an empty memory file: an access to them is a SIGBUS.

A process that has opened a device file itself, such as a monitor, uses it and must not be dumped this way. An inherited
descriptor shares its open file description with a descriptor of the parent (``kcmp(2)``), and an inherited mapping is
at the same address in the parent. Both can be seen only until the parent is checkpointed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from slurm_affinode.base import kernel_text
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.node_config import CRIU_PLUGIN
from slurm_affinode.base.pidfd import PROC, Process, ProcessGoneError
from slurm_affinode.base.process import replaceable

NVIDIA = re.compile(r"/dev/nvidia(\d+|ctl|-uvm(-tools)?|-modeset|-caps/.*)")
"""Names of the driver's device files."""
MAJORS_VARIABLE = "SLURM_AFFINODE_DEVICE_MAJORS"
"""Environment variable of the plugin: major numbers, separated by commas."""
_DRIVER = "nvidia"
_SECTION = "Character devices:"


def majors(*, proc: Path = PROC) -> frozenset[int]:
    """Return the major numbers of the driver's device files; empty if no driver is loaded."""
    numbers, in_section = set(), False
    with suppress(OSError):
        for line in kernel_text.lines(proc / "devices"):
            number, _, name = line.strip().partition(" ")
            if not name or line.endswith(":"):
                in_section = line == _SECTION
            elif in_section and name.startswith(_DRIVER) and (major := kernel_text.number(number)):
                numbers.add(major)
    return frozenset(numbers)


class _Mapping(NamedTuple):
    begin: int
    end: int
    offset: int
    device: str
    inode: str


def inherited(process: Process, ancestor: Process) -> bool:
    """Return whether the process has all of its device files from an ancestor that still has them.

    Each descriptor shares its open file description with one of the ancestor, and each mapping is part of a mapping of
    the ancestor. Raises ``ProcessGoneError``, ``OSError``.
    """
    numbers_by_name: dict[str, list[int]] = {}
    for number, name in _descriptors(ancestor):
        numbers_by_name.setdefault(name, []).append(number)
    for number, name in _descriptors(process):
        # A fork keeps the numbers, so the first comparison is nearly always the last.
        same = numbers_by_name.get(name, ())
        if not any(process.shares(number, ancestor, fd) for fd in [*filter(number.__eq__, same), *same]):
            return False
    above = list(_mappings(ancestor))
    return all(any(_is_part(mapping, other_mapping) for other_mapping in above) for mapping in _mappings(process))


def _descriptors(process: Process) -> Iterator[tuple[int, str]]:
    for number in process.names("fd"):
        try:
            name = process.link(f"fd/{number}")
        except ProcessGoneError:
            raise
        except OSError:
            continue  # closed meanwhile
        if NVIDIA.fullmatch(name):
            yield int(number), name


def _mappings(process: Process) -> Iterator[_Mapping]:
    for line in process.text_lines("maps"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not NVIDIA.fullmatch(fields[5]):
            continue
        begin, end = (kernel_text.number(word, 16) for word in fields[0].partition("-")[::2])
        offset = kernel_text.number(fields[2], 16)
        if begin is None or end is None or offset is None:
            raise OSError(f"process {process.pid}: a mapping without addresses")
        yield _Mapping(begin, end, offset, fields[3], fields[4])


def _is_part(mapping: _Mapping, other_mapping: _Mapping) -> bool:
    return (
        (mapping.device, mapping.inode) == (other_mapping.device, other_mapping.inode)
        and other_mapping.begin <= mapping.begin
        and mapping.end <= other_mapping.end
        and mapping.offset - other_mapping.offset == mapping.begin - other_mapping.begin
    )


def find_device_file(process: Process, numbers: Collection[int]) -> str | None:
    """Return the name of a device file that the process has open or mapped, or ``None``.

    ``numbers``: the major numbers of such files. Raises ``ProcessGoneError``, ``OSError``.
    """
    places = [f"fd/{number}" for number in process.names("fd")]
    for line in process.text_lines("maps"):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/dev/"):
            # The names of the links have no leading zeros.
            begin, _, end = fields[0].partition("-")
            places.append(f"map_files/{begin.lstrip('0')}-{end.lstrip('0')}")
    for place in places:
        try:
            facts = process.facts(place)
        except ProcessGoneError:
            raise
        except OSError:
            continue  # closed meanwhile
        device = stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode)
        if device and os.major(facts.st_rdev) in numbers:
            return process.link(place)
    return None


def why_not(plugin: Path = CRIU_PLUGIN, *, proc: Path = PROC) -> str | None:
    """Return why device files cannot be dumped on this node, in one line, or ``None`` if they can."""
    if not majors(proc=proc):
        return f"{proc / 'devices'} lists no device files of the NVIDIA driver"
    return why_no_plugin(plugin)


def why_no_plugin(plugin: Path = CRIU_PLUGIN) -> str | None:
    """Return why the plugin cannot be used on this node, in one line, or ``None`` if it can."""
    try:
        with opened(plugin):
            return None
    except UnreachableError as error:
        return f"{error} ({error.hint})"


@contextmanager
def opened(plugin: Path = CRIU_PLUGIN) -> Iterator[int]:
    """Yield a descriptor of the plugin's directory, for ``criu --libdir``. CRIU loads every library that is there.

    Raises ``UnreachableError`` if the plugin is missing, if users other than root can replace it, or if the directory
    holds anything else.
    """
    try:
        loose = replaceable(plugin)
        fd = os.open(plugin.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(plugin, error.strerror or "", "install it with make -C spank install") from None
    try:
        if loose is not None:
            raise _unusable(plugin, f"users other than root may write to {loose}")
        _check(fd, plugin)
        yield fd
    finally:
        os.close(fd)


def _check(fd: int, plugin: Path) -> None:
    """Check the opened directory, which may not be the one that the path led to before."""
    if os.listdir(fd) != [plugin.name]:
        raise _unusable(plugin, "it is not the only file of its directory")
    directory, file = os.fstat(fd), os.stat(plugin.name, dir_fd=fd, follow_symlinks=False)
    foreign_owners = {directory.st_uid, file.st_uid} - {0, os.geteuid()}
    if foreign_owners or (directory.st_mode | file.st_mode) & 0o022 or not stat.S_ISREG(file.st_mode):
        raise _unusable(plugin, "it is not a file that belongs to root alone")


def _unusable(plugin: Path, why: str, hint: str = "install it anew with make -C spank install") -> UnreachableError:
    return UnreachableError(f"the CRIU plugin {plugin} cannot be used: {why}", hint=hint)


def environment(numbers: Collection[int]) -> Mapping[str, str]:
    """Return the plugin's part of CRIU's environment."""
    return {MAJORS_VARIABLE: ",".join(map(str, sorted(numbers)))}
