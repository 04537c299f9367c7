"""``slurm-affinode zombies install``: install the systemd timer or the crontab."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import click

from slurm_affinode.base import process
from slurm_affinode.base.config import DEFAULT_PATH, DEFAULT_POLICY, Config, load
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import write_text
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.text import span
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import Span, config_options, echo, json_option, print_json
from slurm_affinode.pipeline.timer_files import (
    SYSTEMCTL_S,
    SYSTEMD_RUNNING,
    absolute,
    crontab_values,
    fill,
    unit_values,
)

_INSTALL_EPILOG = """\b
Examples:
  slurm-affinode zombies install                       systemd if it is running, else cron; every 15 minutes
  slurm-affinode zombies install --cron --every 10m --user slurm-affinode
  slurm-affinode zombies install --root /tmp/image     only write the files, for an image or a package
  slurm-affinode zombies install --remove
"""
_COMMAND = "slurm-affinode zombies clean --warn --live --yes"
"""The command in the shipped files, which is replaced by the requested one."""
_CAPABILITIES = "CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_SETGID CAP_SETUID\n"
_SERVICE, _TIMER, _CRON = "slurm-affinode-zombies.service", "slurm-affinode-zombies.timer", "slurm-affinode-zombies"


@command(epilog=_INSTALL_EPILOG)
@config_options
@click.option(
    "--systemd/--cron", "systemd", default=None, help="Select the scheduler  [default: systemd if it is running]"
)
@click.option("--every", type=Span(60), default="15m", show_default=True, metavar="SPAN", help="Run every SPAN")
@click.option("--user", default="root", show_default=True, metavar="NAME",
              help="Run as root, SlurmUser, or a user in agent.admins")  # fmt: skip
@click.option("--warn-only", is_flag=True, help="Only send warnings; cancel nothing")
@click.option("--options", metavar="TEXT",
              help="Set the options of the command  [default: --live, --prometheus if configured]")  # fmt: skip
@click.option("--root", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Write files below DIR; start nothing")  # fmt: skip
@click.option("--remove", is_flag=True, help="Remove the installed files")
@json_option
def install(
    *, config: Config, systemd: bool | None, every: float, user: str, warn_only: bool, options: str | None,
    root: Path | None, remove: bool, as_json: bool,
) -> int:  # fmt: skip
    """Install the timer (systemd) or crontab for warnings and clean-up, and a policy if there is none."""
    base = root or Path("/")
    if options is None:
        options = f"--live --prometheus {config.prometheus.url}" if config.prometheus.url else "--live"
    if not remove and config.store.db != load(config.source, env={}).store.db:
        raise AffinodeError(
            "the timer reads its store from the configuration, and not from --db or SLURM_AFFINODE_DB",
            hint=f"write it as store.db into {config.source or DEFAULT_PATH}",
        )
    if root is None and os.geteuid() != 0:
        raise AffinodeError("only root can install it", hint="or write the files somewhere: --root DIR")
    if not user.isprintable() or any(c in user for c in " %:/"):
        raise AffinodeError(f"{user!r} is not a user name")
    if not options.isprintable():
        raise AffinodeError(f"{options!r} cannot be written into a unit or a crontab")
    if root is None:
        try:
            pwd.getpwnam(user)
        except KeyError:
            raise AffinodeError(f"there is no user {user}", hint="--user NAME") from None
    by_systemd = SYSTEMD_RUNNING.is_dir() if systemd is None else systemd
    units, cron = base / "etc/systemd/system", base / "etc/cron.d" / _CRON
    if remove:
        removed = _remove([units / _SERVICE, units / _TIMER, cron], start=root is None)
        _say(as_json, removed=removed)
        return 0
    verb = "warn" if warn_only else "clean --warn"
    command = f"slurm-affinode zombies {verb} {options} --yes".replace("  ", " ")
    written = []
    policy = absolute(config.zombies.policy or DEFAULT_POLICY)
    site = base / policy.lstrip("/")
    if not site.exists():
        write_text(site, (asset_dir("reports") / "zombies-policy.toml").read_text(encoding="utf-8"))
        written.append(site)
    if by_systemd:
        values = _service(config, command, user, policy, on_this_host=root is None) | {"=15min": f"={round(every)}s"}
        written += [fill(asset_dir("reports") / "systemd" / name, units / name, values) for name in (_SERVICE, _TIMER)]
    else:
        line = f"{_minutes(every)} * * * * {user} {command.replace('%', chr(92) + '%')}"
        values = {f"*/15 * * * * root {_COMMAND}": line} | crontab_values(config, on_this_host=root is None)
        written.append(fill(asset_dir("reports") / "cron.d" / _CRON, cron, values))
    if root is None and by_systemd:
        process.run(("systemctl", "daemon-reload"), timeout_s=SYSTEMCTL_S)
        process.run(("systemctl", "enable", "--now", _TIMER), timeout_s=SYSTEMCTL_S)
    # Timer and crontab exclude each other: remove the one installed earlier.
    removed_files = _remove([cron] if by_systemd else [units / _SERVICE, units / _TIMER], start=root is None)
    _say(as_json, written=written, **({"removed": removed_files} if removed_files else {}))
    return 0


def _service(config: Config, command: str, user: str, policy: str, *, on_this_host: bool) -> dict[str, str]:
    """Return the replacements in the service unit; ``on_this_host``: for this machine, not for an OS image."""
    values = {
        _COMMAND: command.replace("%", "%%").replace("$", "$$"),
        "User=root\n": f"User={user}\n", "-o root ": f"-o {user} ",
        f"={DEFAULT_POLICY}\n": f"={policy.replace('%', '%%')}\n",
    }  # fmt: skip
    if user != "root":
        values[_CAPABILITIES] = "CapabilityBoundingSet=\n"
    return values | unit_values(config, on_this_host=on_this_host)


def _minutes(every_s: float) -> str:
    """Return the minute field of a crontab line. Raises ``AffinodeError`` if cron cannot express the interval."""
    minutes = max(1, round(every_s / 60))
    if minutes < 60 and 60 % minutes == 0:
        return "*" if minutes == 1 else f"*/{minutes}"
    if minutes == 60:
        return "7"
    raise AffinodeError(
        f"cron cannot run every {span(every_s)}", hint="choose a part of an hour: 5m, 10m, 15m, 30m, 1h"
    )


def _remove(paths: list[Path], *, start: bool) -> list[Path]:
    present = [path for path in paths if path.exists()]
    if start and any(path.name == _TIMER for path in present):
        process.run(("systemctl", "disable", "--now", _TIMER), timeout_s=SYSTEMCTL_S, check=False)
    for path in present:
        path.unlink()
    if start and any(path.name == _TIMER for path in present):
        process.run(("systemctl", "daemon-reload"), timeout_s=SYSTEMCTL_S, check=False)
    return present


def _say(as_json: bool, **paths: list[Path]) -> None:
    if as_json:
        print_json(paths)
        return
    for word, written in paths.items():
        for path in written:
            echo(f"{word} {path!s}")
        if not written:
            echo(f"nothing {word}")
