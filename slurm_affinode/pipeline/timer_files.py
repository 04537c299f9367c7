"""Units and crontabs of timers: the shipped files with the paths, users and commands of a site."""

from __future__ import annotations

import functools
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_affinode.base.config import DEFAULT_PATH, ENV_CONFIG, ENV_STATE, Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import write_text

SYSTEMCTL_S = 30.0
SYSTEMD_RUNNING = Path("/run/systemd/system")
STATE_DIR = "/var/lib/slurm-affinode"
"""The state directory in the shipped files."""
_PROGRAM = "slurm-affinode"
_HOME = "XDG_STATE_HOME=/var/lib"
_PATH = "PATH=/opt/slurm-affinode/bin:/usr/local/bin:/usr/bin:/bin"
_PLAIN = re.compile(r"[\w/.:=@+,%-]+")


def unit_values(config: Config, *, on_this_host: bool) -> dict[str, str]:
    """Return the replacements of environment and state directory in a shipped service.

    ``on_this_host``: see ``search_path``.

    Raises ``AffinodeError`` if a path cannot be written into a unit.
    """
    lines = "".join(f"Environment={quoted(variable)}\n" for variable in environment(config))
    values = {f"Environment={_HOME}\n": lines}
    if config.store.state_dir is not None:
        state = absolute(config.store.state_dir)
        values[f"' {STATE_DIR}\n"] = f"' {quoted(state).replace('$', '$$')}\n"
        values[f"=-{STATE_DIR}\n"] = f"={quoted('-' + state)}\n"
    return values | search_path(config, quoted, on_this_host=on_this_host)


def crontab_values(config: Config, *, on_this_host: bool) -> dict[str, str]:
    """Return the replacements of the environment in a shipped crontab; ``on_this_host``: see ``search_path``."""
    values = {f"{_HOME}\n": "".join(f"{variable}\n" for variable in environment(config))}
    return values | search_path(config, lambda text: text, on_this_host=on_this_host)


def environment(config: Config) -> list[str]:
    """Return environment variables with which a timer uses the same configuration as this command."""
    # Variables override the configuration file: set the state directory only if it is not the default.
    state = config.store.state_dir
    variables = [_HOME if state is None else f"{ENV_STATE}={absolute(state)}"]
    if config.source is not None and config.source != DEFAULT_PATH:
        variables.append(f"{ENV_CONFIG}={absolute(config.source)}")
    return variables


def search_path(config: Config, quote: Callable[[str], str], *, on_this_host: bool) -> dict[str, str]:
    """Return the replacement of ``PATH``.

    Slurm's directory is prepended and, with ``on_this_host`` (the file is for this machine, not for an OS image), this
    program's directory if the default ``PATH`` lacks it.
    """
    places = [] if config.slurm.bin_dir is None else [absolute(config.slurm.bin_dir)]
    interpreter_dir, default_path = Path(sys.executable).parent, _PATH.partition("=")[2]
    if (
        on_this_host
        and not shutil.which(_PROGRAM, path=default_path)
        and (interpreter_dir / _PROGRAM).exists()
        and ":" not in str(interpreter_dir)
    ):
        places.append(str(interpreter_dir))
    return {f"{_PATH}\n": quote("PATH=" + ":".join((*places, default_path))) + "\n"} if places else {}


def absolute(path: Path) -> str:
    """Return the absolute path. Raises ``AffinodeError`` if a unit or a crontab cannot contain it."""
    text = str(path.absolute())
    if not text.isprintable():
        raise AffinodeError(f"{text!r} cannot be written into a unit or a crontab")
    return text


def quoted(text: str) -> str:
    """Quote a word for a unit file."""
    text = text.replace("%", "%%")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace(chr(92), chr(92) * 2).replace('"', chr(92) + '"')
    return f'"{escaped}"'


def filled(template: Path, values: Mapping[str, str]) -> str:
    """Return the text of a shipped file with these replacements."""
    return functools.reduce(lambda text, item: text.replace(*item), values.items(), template.read_text("utf-8"))


def fill(template: Path, target: Path, values: Mapping[str, str]) -> Path:
    """Write a shipped file with these replacements to ``target``; return ``target``."""
    write_text(target, filled(template, values))
    return target
