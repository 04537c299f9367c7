"""Set up the machine of the reports: its user, directories, configuration, timer, and the first nightly run.

``prepare`` compares the machine with what it should have, and creates what is missing only with ``act``. User and
directory are those of the packages (``reports/systemd/slurm-affinode.sysusers.conf`` and ``.tmpfiles.conf``).
"""

from __future__ import annotations

import functools
import json
import os
import pwd
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_affinode.base import process
from slurm_affinode.base.config import DEFAULT_PATH, REPORT_ENTRIES, Config, parse, read_small
from slurm_affinode.base.errors import AffinodeError, ConfigError, UnreachableError
from slurm_affinode.base.files import give_to_owner, replacing
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.toml_schema import TomlFile, parsed
from slurm_affinode.pipeline.timer_files import (
    STATE_DIR,
    SYSTEMCTL_S,
    SYSTEMD_RUNNING,
    absolute,
    crontab_values,
    environment,
    filled,
    quoted,
    unit_values,
)

PRESENT, FAILED, NOT_DONE = "present", "failed", "not done"
PLANNED = frozenset({"would create", "would change"})
"""States of steps without ``act``."""
USER = "slurm-affinode"
_FIRST_RUN_S = 6 * 3600.0
"""As ``TimeoutStartSec`` of the nightly service."""
_USERADD_S = 30.0
_USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_UNITS = ("slurm-affinode-nightly.service", "slurm-affinode-nightly.timer")
_CRON = "slurm-affinode"
_DATABASE = "affinode.sqlite"
_MOST_FILES = 100_000


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the machine."""

    uid: int
    gid: int


def account(name: str) -> Account | None:
    """Return the user of this name, or ``None``."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_uid, entry.pw_gid)


def run(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
    """Run a program. Raises ``UnreachableError`` with all that it wrote to standard error if it fails."""
    completed = process.run(argv, timeout_s=timeout_s, env={**os.environ, **env}, check=False)
    if completed.returncode != 0:
        lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
        raise UnreachableError(f"status {completed.returncode}: {'; '.join(lines) or 'no output'}")


def program() -> Path:
    """Return the path of the command ``slurm-affinode`` beside this Python, or on ``PATH``."""
    beside = Path(sys.executable).parent / "slurm-affinode"
    return beside if beside.exists() else Path(shutil.which("slurm-affinode") or beside)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine: everything that ``prepare`` may read or change."""

    root: Path = Path("/")
    account: Callable[[str], Account | None] = account
    run: Callable[[Sequence[str], Mapping[str, str], float], None] = run
    """Arguments: program and arguments, further environment variables, time limit in seconds. Raises
    ``AffinodeError``."""
    systemd_runs: bool = SYSTEMD_RUNNING.is_dir()
    program: Path = field(default_factory=program)
    """The command ``slurm-affinode``."""
    python: Path = Path(sys.executable)

    def locate(self, path: Path | str) -> Path:
        """Return the place of an absolute path on this machine."""
        return self.root / str(path).lstrip("/")


@dataclass(frozen=True, slots=True)
class SetupRequest:
    """How the machine is to be set up. ``None``: as the configuration says, or its default."""

    user: str = USER
    config: Path = DEFAULT_PATH
    state_dir: Path | None = None
    prometheus: str | None = None
    """The URL of the server with GPU metrics."""
    timezone: str | None = None
    systemd: bool = True
    """A systemd timer, otherwise a crontab."""
    first_run: bool = True

    def __post_init__(self) -> None:
        """Check names and paths, which are written into units and crontabs. Raises ``AffinodeError``."""
        if not _USER_NAME.fullmatch(self.user):
            raise AffinodeError(
                f"{self.user!r} is not the name of a user", hint="use lower-case letters, digits, - and _: --user NAME"
            )
        if self.user == "root":
            raise AffinodeError("reports are not made by root", hint="give --user another name")
        for path in (self.config, self.state_dir):
            if path is not None and not path.is_absolute():
                raise AffinodeError(f"{str(path)!r} is not an absolute path")
            if path is not None:
                absolute(path)

    @property
    def settings(self) -> dict[tuple[str, str], str]:
        """The requested values in the configuration."""
        values = {
            ("prometheus", "url"): self.prometheus,
            ("cluster", "timezone"): self.timezone,
            ("store", "state_dir"): None if self.state_dir is None else str(self.state_dir),
        }
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SetupStep:
    """A part of the setup, and whether it is done."""

    name: str
    target: str
    state: str
    detail: str = ""
    command: str | None = None
    """The command that does it by hand, unless it is done."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part before it is done."""

    name: str
    target: str
    command: str
    act: Callable[[], None] | None = None
    """``None``: nothing is missing."""
    detail: str = ""
    problem: str | None = None
    """Why it cannot be done."""
    changes: bool = False
    """Something exists and is changed."""


def prepare(request: SetupRequest, host: Host, *, act: bool) -> list[SetupStep]:
    """Compare the machine with ``request``; with ``act``, create what is missing. Idempotent.

    After a failed step, nothing more is done. Raises ``ConfigError`` if the configuration cannot be read.
    """
    steps: list[SetupStep] = []
    for examine in (
        _program,
        _user,
        _configuration,
        _state_directory,
        _ownership,
        _timer,
        _enabled,
        _other_timer,
        _first_report,
    ):
        part = examine(request, host)
        if part is not None:
            stopped = act and any(step.state == FAILED for step in steps)
            steps.append(_step(part, act=act, stopped=stopped))
    return steps


def configuration(request: SetupRequest, host: Host) -> Config:
    """Return the configuration as it will be. Raises ``ConfigError``."""
    _, text = _texts(request, host)
    return replace(parse(text, where=str(request.config)), source=request.config)


def _step(part: _Part, *, act: bool, stopped: bool) -> SetupStep:
    if part.act is None and part.problem is None:
        return SetupStep(part.name, part.target, PRESENT, part.detail)
    if stopped:
        return SetupStep(part.name, part.target, NOT_DONE, "after the failed step", part.command)
    if part.problem is not None:
        return SetupStep(part.name, part.target, FAILED, part.problem, part.command)
    if not act:
        return SetupStep(
            part.name, part.target, "would change" if part.changes else "would create", part.detail, part.command
        )
    try:
        if part.act is not None:
            part.act()
    except AffinodeError as error:
        return SetupStep(part.name, part.target, FAILED, str(error), part.command)
    except OSError as error:
        return SetupStep(part.name, part.target, FAILED, error.strerror or str(error), part.command)
    return SetupStep(part.name, part.target, "changed" if part.changes else "created", part.detail)


def _definition(suffix: str) -> list[str]:
    """Return the words of the line of a definition of the packages."""
    text = (asset_dir("reports") / "systemd" / f"slurm-affinode.{suffix}.conf").read_text("utf-8")
    line = next(line for line in text.splitlines() if line and not line.startswith("#"))
    return shlex.split(line)


def _program(_request: SetupRequest, host: Host) -> _Part:
    """The user of the timer has to reach the program; an environment below ``/root`` is closed to others."""
    command = "python3 -m venv /opt/slurm-affinode    # and install slurm-affinode there"
    for path in (host.program, host.python):
        places = (place for file in (path, path.resolve()) for place in (*reversed(file.parents), file))
        closed = next((place for place in places if place.exists() and not place.stat().st_mode & stat.S_IXOTH), None)
        if closed is not None:
            return _Part(
                "program", str(host.program), command, problem=f"{closed}: other users may not enter or run it"
            )
    return _Part("program", str(host.program), command)


def _user(request: SetupRequest, host: Host) -> _Part:
    _, _, _, comment, home, shell = _definition("sysusers")
    argv = (
        "useradd", "--system", "--user-group", "--no-create-home", "--comment", comment, "--home-dir",
        str(request.state_dir or home), "--shell", shell, request.user,
    )  # fmt: skip
    exists = host.account(request.user) is not None
    act = None if exists else lambda: host.run(argv, {}, _USERADD_S)
    return _Part("user", request.user, shlex.join(argv), act)


def _texts(request: SetupRequest, host: Host) -> tuple[str | None, str]:
    """Return the text of the configuration, if there is one, and the text with the requested settings."""
    try:
        current: str | None = read_small(host.locate(request.config)).decode("utf-8")
    except FileNotFoundError:
        current = None
    except OSError as error:
        raise ConfigError(f"{request.config}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{request.config}: is not UTF-8 text", hint="save it as UTF-8") from error
    text = (asset_dir("reports") / "config.toml").read_text("utf-8") if current is None else current
    return current, with_settings(text, request.settings, where=str(request.config))


def with_settings(text: str, settings: Mapping[tuple[str, str], str], *, where: str) -> str:
    """Return the TOML text with ``(section, key) -> value`` set; comments and other keys are unchanged.

    A commented line of the key is replaced. A key with a value keeps it: ``SetupRequest.settings`` that differ are
    conflicts. Raises ``ConfigError`` if the text, before or after, is not TOML.
    """
    values = parsed(text, where=where)
    lines = text.removesuffix("\n").split("\n")
    for (section, key), value in settings.items():
        if key in values.get(section, {}):
            continue
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        header = next((i for i, row in enumerate(lines) if re.match(rf"\[{section}\]\s*(#|$)", row)), None)
        if header is None:
            lines += ["", f"[{section}]", line]
            continue
        end = next((i for i in range(header + 1, len(lines)) if lines[i].startswith("[")), len(lines))
        commented = (i for i in range(header + 1, end) if re.match(rf"#\s*{key}\s*=", lines[i]))
        place = next(commented, None)
        if place is None:
            lines.insert(header + 1, line)
        else:
            lines[place] = line
    settings_text = "\n".join(lines) + "\n"
    for (section, key), value in settings.items():
        values.setdefault(section, {}).setdefault(key, value)
    made_file = TomlFile(settings_text)
    if made_file.faults or made_file.data != values:
        raise ConfigError(f"{where}: cannot be extended: its sections are not written as [section]", hint="edit it")
    return settings_text if settings else text


def _configuration(request: SetupRequest, host: Host) -> _Part:
    current, text = _texts(request, host)
    path, target = host.locate(request.config), str(request.config)
    user_account = host.account(request.user)
    command = f"${{EDITOR:-vi}} {shlex.quote(target)}"
    values = parsed(text, where=target)
    shown = [f"{section}.{key} = {values[section][key]}" for section, key in request.settings]
    differing = [
        f"{section}.{key} is {values[section][key]!r} and not {value!r}"
        for (section, key), value in request.settings.items()
        if values[section][key] != value
    ]
    if differing:
        return _Part("configuration", target, command, problem="; ".join(differing))
    if user_account is not None and current is not None and not _readable(path, user_account):
        command = f"chgrp {request.user} {shlex.quote(target)} && chmod g+r {shlex.quote(target)}"
        shown.append(f"readable by {request.user}")
    elif current == text:
        return _Part("configuration", target, command)

    def write() -> None:
        if current != text:
            _write(path, text)
        user = _existing_account(request, host)
        if not _readable(path, user):
            _open_to(path, user)

    return _Part("configuration", target, command, write, ", ".join(shown), changes=current is not None)


def _readable(path: Path, user: Account) -> bool:
    facts = path.stat()
    if facts.st_uid == user.uid:
        return bool(facts.st_mode & stat.S_IRUSR)
    return bool(facts.st_mode & (stat.S_IRGRP if facts.st_gid == user.gid else stat.S_IROTH))


def _open_to(path: Path, user: Account) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchown(file, -1, user.gid)
        os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) | stat.S_IRGRP)
    finally:
        os.close(file)


def _write(path: Path, text: str) -> None:
    """Write a file; an existing one keeps mode, owner and group, a symbolic link its place."""
    path = path.resolve()
    facts = path.stat() if path.exists() else None
    with replacing(path, mode=0o644 if facts is None else stat.S_IMODE(facts.st_mode)) as temporary:
        temporary.write_text(text, encoding="utf-8")
        if facts is not None:
            os.chown(temporary, facts.st_uid, facts.st_gid)


def _state_directory(request: SetupRequest, host: Host) -> _Part:
    state = _state(request, host)
    path, user_account = host.locate(state), host.account(request.user)
    mode = _definition("tmpfiles")[2].lstrip(":")
    command = f"install -d -m {mode} -o {request.user} -g {request.user} {shlex.quote(str(state))}"

    def create() -> None:
        user = _existing_account(request, host)
        path.mkdir(parents=True, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(directory, user.uid, user.gid)
            os.fchmod(directory, int(mode, 8))
        finally:
            os.close(directory)

    detail = f"owner {request.user}, mode {mode}"
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return _Part("state directory", str(state), command, create, detail)
    if not stat.S_ISDIR(facts.st_mode):
        return _Part("state directory", str(state), command, problem="it is not a directory")
    if user_account is not None and facts.st_uid == user_account.uid:
        return _Part("state directory", str(state), command)
    if facts.st_uid != 0:
        return _Part("state directory", str(state), command, problem=f"it belongs to another user ({facts.st_uid})")
    foreign = sorted(entry.name for entry in path.iterdir() if not _belongs_to_reports(entry.name))
    if foreign:
        problem = f"it belongs to root, and has {', '.join(foreign[:3])}, perhaps of an agent: give --state another one"
        return _Part("state directory", str(state), "slurm-affinode setup report --state DIR", problem=problem)
    return _Part("state directory", str(state), command, create, f"{detail}; it belongs to root", changes=True)


def _belongs_to_reports(name: str) -> bool:
    return name in REPORT_ENTRIES or name.startswith(_DATABASE)


def _ownership(request: SetupRequest, host: Host) -> _Part | None:
    """Files that commands run by root have left in the state directory."""
    state = _state(request, host)
    path = host.locate(state)
    if not path.is_dir():
        return None
    names = sorted(entry.name for entry in path.iterdir() if _belongs_to_reports(entry.name))
    count = sum(1 for name in names for _ in _owned_by_root(path / name))
    places = " ".join(shlex.quote(str(state / name)) for name in names)
    command = f"chown -R --no-dereference --from=root {request.user}:{request.user} {places}"
    if not count:
        return _Part("owner of reports and database", str(state), command)
    detail = f"{count} {'file belongs' if count == 1 else 'files and directories belong'} to root"
    return _Part(
        "owner of reports and database", str(state), command, lambda: give_to_owner(path, names), detail, changes=True
    )


def _owned_by_root(path: Path) -> Iterator[Path]:
    """Yield the files and directories of root at and below ``path``; links are not followed."""
    pending = [path]
    for _ in range(_MOST_FILES):
        if not pending:
            return
        place = pending.pop()
        try:
            facts = place.lstat()
            if stat.S_ISDIR(facts.st_mode):
                pending += place.iterdir()
        except OSError:  # it was deleted meanwhile
            continue
        if facts.st_uid == 0 and not stat.S_ISLNK(facts.st_mode):
            yield place


def _timer(request: SetupRequest, host: Host) -> _Part:
    config = configuration(request, host)
    if not request.systemd:
        values = {f"* * * {USER} ": f"* * * {request.user} "} | crontab_values(config, on_this_host=True)
        target = Path("/etc/cron.d") / _CRON
        texts = {target: filled(asset_dir("reports") / "cron.d" / _CRON, values)}
    else:
        values = {
            f"User={USER}\nGroup={USER}\n": f"User={request.user}\nGroup={request.user}\n",
            f"-o {USER} -g {USER} ": f"-o {request.user} -g {request.user} ",
        } | unit_values(config, on_this_host=True)
        if config.nightly.out is not None:
            values["CapabilityBoundingSet=\n"] = (
                f"ReadWritePaths={quoted('-' + absolute(config.nightly.out))}\nCapabilityBoundingSet=\n"
            )
        units = asset_dir("reports") / "systemd"
        texts = {Path("/etc/systemd/system") / name: filled(units / name, values) for name in _UNITS}
    missing = {path: text for path, text in texts.items() if not _installed(host, path, text)}
    target = next(iter(texts)) if len(texts) == 1 else next(iter(texts)).with_suffix(".{service,timer}")
    command = f"cp reports/{'systemd' if request.systemd else 'cron.d'}/{target.name} {target.parent}/"

    def write() -> None:
        for path, text in missing.items():
            _write(host.locate(path), text)

    detail = f"nightly as {request.user}, 04:17 local time"
    return _Part("timer" if request.systemd else "crontab", str(target), command, write if missing else None, detail)


def _installed(host: Host, path: Path, text: str) -> bool:
    """Return whether a file has this text; a unit may be that of a package."""
    places = [host.locate(path)]
    if path.parent == Path("/etc/systemd/system") and not places[0].exists():
        places += [host.locate(Path(top) / "systemd/system" / path.name) for top in ("/usr/lib", "/lib")]
    return any(place.is_file() and place.read_text("utf-8", "replace") == text for place in places)


def _enabled(request: SetupRequest, host: Host) -> _Part | None:
    if not request.systemd:
        return None
    timer = _UNITS[1]
    link = host.locate("/etc/systemd/system/timers.target.wants") / timer
    now = ("--now",) if host.systemd_runs else ()
    argv = ("systemctl", "enable", *now, timer)

    def enable() -> None:
        if host.systemd_runs:
            host.run(("systemctl", "daemon-reload"), {}, SYSTEMCTL_S)
        host.run(argv, {}, SYSTEMCTL_S)

    return _Part("timer enabled", timer, shlex.join(argv), None if link.is_symlink() else enable)


def _other_timer(request: SetupRequest, host: Host) -> _Part | None:
    """The crontab beside the timer, or the other way round: reports would be made twice."""
    cron = host.locate("/etc/cron.d") / _CRON
    link = host.locate("/etc/systemd/system/timers.target.wants") / _UNITS[1]
    if request.systemd and cron.exists():
        return _Part("crontab removed", f"/etc/cron.d/{_CRON}", f"rm /etc/cron.d/{_CRON}", cron.unlink, changes=True)
    if not request.systemd and link.is_symlink():
        argv = ("systemctl", "disable", *(("--now",) if host.systemd_runs else ()), _UNITS[1])
        disable = functools.partial(host.run, argv, {}, SYSTEMCTL_S)
        return _Part("timer disabled", _UNITS[1], shlex.join(argv), disable, changes=True)
    return None


def _first_report(request: SetupRequest, host: Host) -> _Part | None:
    """The nightly run, as the user of the timer: it ingests what there is, and makes the reports that are due."""
    if not request.first_run:
        return None
    config = configuration(request, host)
    reports = config.nightly.out or _state(request, host) / "reports"
    argv = ("runuser", "-u", request.user, "--", "env", *environment(config), str(host.program), "nightly")
    act = None if host.locate(reports / "index.json").exists() else lambda: host.run(argv, {}, _FIRST_RUN_S)
    detail = "" if act is None else "by slurm-affinode nightly"
    return _Part("first ingest and reports", str(reports), shlex.join(argv), act, detail)


def _existing_account(request: SetupRequest, host: Host) -> Account:
    user = host.account(request.user)
    if user is None:
        raise UnreachableError(f"there is no user {request.user}")
    return user


def _state(request: SetupRequest, host: Host) -> Path:
    return configuration(request, host).store.state_dir or Path(STATE_DIR)
