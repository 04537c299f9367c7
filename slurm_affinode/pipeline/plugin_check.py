"""``doctor`` on a node with an agent: the SPANK plugin against Slurm and against the agent. Read-only.

The plugin exports the release of Slurm for which it was built, its own release and the version of its announcements
(``spank/plugin.c``). Sources: spank(7), elf(5).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from slurm_affinode import __version__
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.node_config import SuspendConfig
from slurm_affinode.base.process import replaceable
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, Check
from slurm_affinode.slurm import scontrol
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.interface import Runner
from slurm_affinode.suspension.job import announcements

NAME = "SPANK plugin"
PLUGIN = "slurm_affinode.so"
SENT_BY_SLURM = Path("/run/slurm/conf")
"""Slurm's configuration on nodes without files of their own (``slurmd --conf-server``)."""
_TIMEOUT_S = 30.0
_INSTALL = "install the package slurm-affinode-spank of this release, or: make -C spank install"
_MOST_INCLUDES = 20
"""Nested ``include`` lines that are followed."""
_LOADED, _DYNAMIC_SYMBOLS = 1, 11
"""``PT_LOAD`` and ``SHT_DYNSYM``."""
_MOST_BYTES = 256
_SHEPHERD = re.compile(rb"(/[!-~]*/slurm-affinode-shepherd)\0")


@dataclass(frozen=True, slots=True)
class Installed:
    """Slurm on this node."""

    version: str
    """Of its commands; slurmd is of the same package."""
    settings: Mapping[str, str]
    """As slurmctld reports them."""


@dataclass(frozen=True, slots=True)
class PluginLine:
    """A line that loads a plugin."""

    plugin: str
    """A path, or a name that is searched in Slurm's ``PluginDir``."""
    arguments: tuple[str, ...]
    file: Path


class _PluginError(AffinodeError):
    """The plugin does not work here."""


class _NoLineError(_PluginError):
    """No line loads the plugin."""


@dataclass(frozen=True, slots=True)
class _Plugin:
    """An installed plugin."""

    path: Path
    slurm: str
    """``24.11``."""
    release: str | None
    """``None``: it does not state one, as that of 0.9.0."""
    announcement: int | None
    shepherd: Path | None
    """Started unless the line in plugstack.conf names another one."""


def installed(run: Runner) -> Installed | None:
    """Return version and settings of Slurm; ``None``: it does not respond, which another check reports."""
    client = CommandsClient(run, timeout_s=_TIMEOUT_S)
    try:
        return Installed(client.version(), client.config())
    except AffinodeError:
        return None


def check(suspend: SuspendConfig, slurm: Installed | None, *, fallback: Path = SENT_BY_SLURM) -> Check:
    """Check line, file and releases of the plugin, and that it starts the agent's shepherd and knows its stores.

    ``fallback``: directory of ``plugstack.conf`` if the one of Slurm's configuration does not have it.
    """
    if slurm is None:
        return Check(NAME, SKIPPED, "not checked: Slurm does not respond", "scontrol show config has to work here")
    try:
        line = _line(slurm.settings, fallback, suspend)
        plugin = _read(line, slurm.settings)
        _check_releases(plugin, slurm.version)
        _check_line(line, plugin, suspend)
    except _NoLineError as error:
        if suspend.dry_run and _empty(suspend.shared_store):
            detail = f"{error}; suspend.dry_run is set, and the shared store has no images"
            return Check(NAME, SKIPPED, detail, f"before suspend.dry_run is removed: {error.hint}")
        return Check(NAME, PROBLEM, str(error), error.hint)
    except _PluginError as error:
        return Check(NAME, PROBLEM, str(error), error.hint)
    if plugin.release != __version__:
        return Check(
            NAME, SKIPPED,
            f"{plugin.path}: of release {plugin.release or 'unknown'}, the agent of {__version__}; they work together",
            f"{_INSTALL}; packages of both in one command: "
            "apt install ./slurm-affinode-node_*.deb ./slurm-affinode-spank_*.deb",
        )  # fmt: skip
    return Check(NAME, OK, f"{plugin.path}: release {plugin.release}, for Slurm {plugin.slurm}")


def _empty(store: Path | None) -> bool:
    """Return whether a store certainly has no image, which a node without the plugin would not restore."""
    if store is None:
        return True
    try:
        return next(store.iterdir(), None) is None
    except FileNotFoundError:
        return store.parent.is_dir()  # else its file system is not mounted
    except OSError:
        return False


def _line(settings: Mapping[str, str], fallback: Path, suspend: SuspendConfig) -> PluginLine:
    """Return the line that loads the plugin. Raises ``_PluginError``."""
    beside = Path(settings.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    path = Path(settings.get("PlugStackConfig") or beside / "plugstack.conf")
    if not path.exists() and (sent := fallback / path.name).exists():
        path = sent
    stores = " ".join(f"store={store}" for store in (suspend.local_store, suspend.shared_store))
    hint = f"add to {path} on all hosts: optional {PLUGIN} {stores}"
    try:
        lines = [line for line in plugin_lines(path) if Path(line.plugin).name == PLUGIN]
    except OSError as error:
        file = error.filename or path
        kind = _NoLineError if isinstance(error, FileNotFoundError) else _PluginError
        raise kind(f"{file}: cannot be read ({error.strerror}): no job can be suspended", hint=hint) from None
    if not lines:
        raise _NoLineError(f"{path}: no line loads {PLUGIN}: no job can be suspended", hint=hint)
    return lines[0]


def _read(line: PluginLine, settings: Mapping[str, str]) -> _Plugin:
    """Read the plugin that a line names. Raises ``_PluginError``."""
    named = Path(line.plugin)
    places = [Path(place) for place in (settings.get("PluginDir") or "/usr/lib/slurm").split(":") if place]
    paths = [named] if named.is_absolute() else [place / named for place in places]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise _PluginError(f"{' and '.join(map(str, paths))}: named in {line.file}, does not exist", hint=_INSTALL)
    try:
        loose = replaceable(path)
        data = path.read_bytes()
        constants = exported(data, ("plugin_version", "slurm_affinode_release", "slurm_affinode_announcement"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _PluginError(f"{path}: {reason}", hint=_INSTALL) from None
    if loose is not None:
        raise _PluginError(
            f"{path}: users other than root may write to {loose}, and slurmd runs the plugin as root",
            hint=f"chown root:root {loose} && chmod go-w {loose}",
        )
    number, release, announcement = (
        constants.get(name) for name in ("plugin_version", "slurm_affinode_release", "slurm_affinode_announcement")
    )
    if number is None:
        raise _PluginError(f"{path}: is not a plugin of Slurm (it exports no plugin_version)", hint=_INSTALL)
    slurm = int.from_bytes(number, "little")
    compiled = _SHEPHERD.search(data)
    return _Plugin(
        path,
        f"{slurm >> 16 & 0xFF}.{slurm >> 8 & 0xFF:02}",
        (release or b"").rstrip(b"\0").decode("ascii", "replace") or None,
        None if announcement is None else int.from_bytes(announcement, "little"),
        None if compiled is None else Path(compiled[1].decode("ascii")),
    )


def _check_releases(plugin: _Plugin, slurm: str) -> None:
    """Raise ``_PluginError`` if Slurm does not load the plugin, or if the agent does not read its announcements."""
    release = scontrol.release(slurm)
    if plugin.slurm != release:
        raise _PluginError(
            f"{plugin.path}: built for Slurm {plugin.slurm}, and this node has {slurm}, which does not load it",
            hint=f"install the package slurm-affinode-spank for Slurm {release}, or with its headers: "
            "make -C spank clean install",
        )
    if plugin.announcement not in (None, announcements.VERSION):
        raise _PluginError(
            f"{plugin.path}: release {plugin.release} writes announcements of version {plugin.announcement}, the agent "
            f"({__version__}) reads {announcements.VERSION}: its jobs are not suspended",
            hint=f"{_INSTALL}; jobs that run keep the shepherd that they started with",
        )


def _check_line(line: PluginLine, plugin: _Plugin, suspend: SuspendConfig) -> None:
    """Raise ``_PluginError`` if the plugin starts another shepherd than the agent's, or does not know its stores."""
    values = [argument.partition("=") for argument in line.arguments]
    shepherd = next((Path(value) for key, _, value in values if key == "shepherd"), plugin.shepherd)
    if not suspend.shepherd.is_file():
        raise _PluginError(f"suspend.shepherd: {suspend.shepherd} does not exist", hint=_INSTALL)
    if shepherd is not None and not (shepherd.is_file() and shepherd.samefile(suspend.shepherd)):
        raise _PluginError(
            f"the plugin starts {shepherd}, and the agent accepts {suspend.shepherd} alone",
            hint=f'set suspend.shepherd = "{shepherd}" in the configuration, or shepherd=PATH in {line.file}',
        )
    stores = {Path(value) for key, _, value in values if key == "store"}
    if suspend.shared_store is not None and suspend.shared_store not in stores:
        raise _PluginError(
            f"{line.file}: store= does not name suspend.shared_store: a suspended job would start from the beginning "
            "while no agent is running",
            hint=f"add store={suspend.shared_store} to the line of {PLUGIN} on all hosts",
        )


def plugin_lines(path: Path, depth: int = 0) -> Iterator[PluginLine]:
    """Yield the lines of a file and of those that it includes, in order. Raises ``OSError`` if it cannot be read."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.partition("#")[0].split()
        if len(words) < 2:
            continue
        if words[0] == "include" and depth < _MOST_INCLUDES:
            for included in sorted(glob(str(path.parent / words[1]))):  # noqa: PTH207 - a pattern may be absolute
                yield from plugin_lines(Path(included), depth + 1)
        elif words[0] in ("optional", "required"):
            yield PluginLine(words[1], tuple(words[2:]), path)


def exported(data: bytes, names: Collection[str]) -> dict[str, bytes]:
    """Return the bytes of the constants that a 64-bit little-endian ELF library exports; those that are missing: none.

    Raises ``ValueError`` if ``data`` is not such a library.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("is not a library for 64-bit little-endian processors")
    try:
        return dict(_exported(data, names))
    except (struct.error, IndexError):
        raise ValueError("is not a complete library") from None


def _exported(data: bytes, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    programs, sections = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    loaded = [
        (begin, begin + length, offset)
        for kind, _, offset, begin, _, length, *_ in (
            struct.unpack_from("<IIQQQQQQ", data, programs + program_size * index) for index in range(program_count)
        )
        if kind == _LOADED
    ]
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections + section_size * index) for index in range(section_count)
    ]
    for _, kind, _, _, offset, length, linked, *_ in headers:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        texts = headers[linked][4]
        for position in range(offset, offset + length, 24):
            name_at, _, _, section, value, size = struct.unpack_from("<IBBHQQ", data, position)
            begin = texts + name_at
            name = data[begin : begin + _MOST_BYTES].partition(b"\0")[0].decode("ascii", "replace")
            place = next((value - first + start for first, last, start in loaded if first <= value < last), None)
            if name in names and section and place is not None:
                yield name, data[place : place + min(size, _MOST_BYTES)]
