"""The support bundle of ``doctor --bundle``: what a support request needs, with secrets removed.

A secret is removed wherever it occurs: each value that configuration, environment and the files named there show to be
one is replaced in every file, and so is text that has the form of a credential.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from slurm_affinode import __version__
from slurm_affinode.base.config import ENV_DB, Config, policy_path
from slurm_affinode.base.errors import AffinodeError, unwritable
from slurm_affinode.base.files import replacing
from slurm_affinode.base.process import run as run_program
from slurm_affinode.slurm.interface import Runner

HIDDEN = "[removed]"
LOG_LINES = 2000
_TIMEOUT_S = 30.0
_LARGEST = 4 << 20
_LEAST = 4
"""A shorter value is no secret, and would be replaced in unrelated text."""
_KEYS = r"(?:api|access|account|storage|shared|image|signing|encryption)[_-]?key"
_WORDS = rf"(?:pass(?:word|wd|phrase)?|mysql_pwd|secret|token|{_KEYS}|credential|authorization|cookie|webhook|jwt)"
_KEY = re.compile(rf"(?:^|[_.-]){_WORDS}s?(?:$|[_.-])|^headers$|[a-z]pass$", re.IGNORECASE)
_FILE = re.compile(r"_file$|^file$", re.IGNORECASE)
_SECRET_SUFFIXES = frozenset({".key", ".password", ".token"})
"""Files with secrets beside the configuration, which units name and it does not."""
_PATTERNS = (
    (re.compile(r"(\bcookie:\s*)[^\r\n\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"((?<!\S)(?:-u|--user)[ =][^\s:\"']+:)[^\s\"']+"), rf"\1{HIDDEN}"),
    (
        re.compile(rf"((?<!\S)--[\w-]*{_WORDS}\s+)(?!-)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?<=://)[^/\s:@\"']*:[^\s\"']+(?=@)"), HIDDEN),
    (re.compile(r"([?&](?:sig|x-\w+-signature)=)[^&\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\b(?:bearer|basic)\s+)(?!realm)[A-Za-z0-9+/._~-]{8,}=*", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(
            rf"(\b[\w.-]*{_WORDS}\w*[\"']?\s*[=:]\s*)(?!\[removed)(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;]+)", re.IGNORECASE
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\bey[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]*)?"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"https?://hooks\.[^\s\"']+"), HIDDEN),
)
_DATABASE_PASSWORD = re.compile(r"[\w+.-]+://[^:/]*:([^@]+)@")
"""In URLs of SQLAlchemy, which accepts ``/``, ``?`` and ``#`` in a password."""
_UNITS = ("agent", "exporter", "nightly", "zombies")
_PATHS = (
    "/etc/os-release", "/etc/slurm/plugstack.conf", "/etc/default/slurm-affinode-exporter", "/proc/version",
    "/proc/meminfo", "/proc/self/mountinfo", "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/user/max_user_namespaces",
)  # fmt: skip
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "slurm.txt": ("scontrol", "show", "config"),
    "criu.txt": ("criu", "check", "--all"),
    "nvidia.txt": ("nvidia-smi",),
    **{f"unit-{unit}.txt": ("systemctl", "cat", f"slurm-affinode-{unit}.service") for unit in _UNITS},
    **{
        f"log-{unit}.txt": (
            "journalctl", "--no-pager", "--output=short-iso", f"--lines={LOG_LINES}", f"--unit=slurm-affinode-{unit}",
        )
        for unit in _UNITS
    },
}  # fmt: skip


class Redactor:
    """Removes secrets from text. ``removed`` counts the replacements."""

    def __init__(self, secrets: Iterable[str]) -> None:
        # The longest first: one may be a part of another.
        known_secrets = sorted({secret for secret in secrets if len(secret) >= _LEAST}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, known_secrets))) if known_secrets else None
        self.removed = 0

    def __call__(self, text: str) -> str:
        """Return the text without secrets."""
        if self._secrets is not None:
            text, count = self._secrets.subn(HIDDEN, text)
            self.removed += count
        for pattern, replacement in _PATTERNS:
            text, count = pattern.subn(replacement, text)
            self.removed += count
        return text


def secrets(texts: Iterable[str], environment: Mapping[str, str], read: Callable[[Path], str]) -> Iterator[str]:
    """Yield the secrets in configuration files (TOML), the environment, and the files that these name.

    ``read`` returns the text of a file. Raises ``OSError`` and ``UnicodeDecodeError``, which skip the file.
    """
    values: list[tuple[str, str]] = list(environment.items())
    for text in texts:
        try:
            values += _leaves(tomllib.loads(text))
        except tomllib.TOMLDecodeError:
            continue
    for key, value in values:
        if _FILE.search(key):
            try:
                yield from (line.strip() for line in read(Path(value)).splitlines())
            except (OSError, UnicodeDecodeError, ValueError):
                continue
        elif _KEY.search(key):
            yield value
        yield from _url_passwords(value)


def _leaves(value: Any, key: str = "", *, secret: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the last key and the text of each value; below a key that names secrets, under that key."""
    if isinstance(value, dict):
        for name, below in value.items():
            hidden = secret or bool(_KEY.search(name) and not _FILE.search(name))
            yield from _leaves(below, key if secret else name, secret=hidden)
    elif isinstance(value, list):
        for element in value:
            yield from _leaves(element, key, secret=secret)
    elif isinstance(value, str):
        yield key, value


def _url_passwords(text: str) -> Iterator[str]:
    passwords = set()
    with contextlib.suppress(ValueError):
        passwords.add(urlsplit(text).password)
    if (match := _DATABASE_PASSWORD.match(text.strip())) is not None:
        passwords.add(match[1])
    for password in filter(None, passwords):
        yield password
        yield unquote(password)


def write(
    path: Path, config: Config, checks: Mapping[str, Any], agent: Callable[[], Mapping[str, Any]], *,
    run: Runner = run_program, environment: Mapping[str, str] = os.environ,
) -> tuple[list[str], int]:  # fmt: skip
    """Write the bundle, readable by its owner only; return the names of its files and the number of removals.

    ``checks``: the output of ``doctor``. ``agent`` requests the metrics of this node's agent. What cannot be read has
    the reason in its place. Raises ``UnreachableError`` if the bundle cannot be written.
    """
    sources = [source for source in (config.source, policy_path(config)) if source is not None]
    texts = {f"config-{source.name}": _text(source) for source in sources}
    variables = {
        name: value for name, value in environment.items() if name.startswith("SLURM_AFFINODE") or _KEY.search(name)
    }
    variables |= {f"{path}_file": str(path) for path in _secret_files(config)}
    redact = Redactor([*secrets(texts.values(), variables, _small), *_url_passwords(config.db_url)])
    files = {
        "about.json": json.dumps({
            "version": __version__, "python": platform.python_version(), "machine": platform.machine(),
            "kernel": platform.release(), "user": os.geteuid(), "database": config.db_url.partition(":")[0],
            "database_from_environment": ENV_DB in environment,
            "packages": {distribution.name: distribution.version for distribution in metadata.distributions()},
        }, indent=1),
        "doctor.json": json.dumps(checks, indent=1, default=str),
        "agent-metrics.json": _metrics(agent),
        **texts,
        **{f"file-{place.strip('/').replace('/', '-')}": _text(Path(place)) for place in _PATHS},
        **{name: _output(run, argv) for name, argv in _COMMANDS.items()},
    }  # fmt: skip
    clean = {name: redact(text) for name, text in files.items()}
    try:
        with replacing(path, mode=0o600) as temporary, tarfile.open(temporary, "w:gz") as archive:
            for name, text in sorted(clean.items()):
                data = text.encode("utf-8", "backslashreplace")
                member = tarfile.TarInfo(f"slurm-affinode-bundle/{name}")
                member.size, member.mode = len(data), 0o600
                archive.addfile(member, io.BytesIO(data))
    except OSError as error:
        raise unwritable(path, error) from error
    return sorted(clean), redact.removed


def _secret_files(config: Config) -> Iterator[Path]:
    """Yield the key of images, whose place is a default, and the files of secrets beside the configuration."""
    yield config.suspend.key_file
    if config.source is not None:
        with contextlib.suppress(OSError):
            yield from (path for path in config.source.parent.iterdir() if path.suffix in _SECRET_SUFFIXES)


def _metrics(agent: Callable[[], Mapping[str, Any]]) -> str:
    try:
        families = agent().get("metrics", [])
    except AffinodeError as error:
        return str(error)
    names = [family for family in families if not str(family.get("name", "")).endswith("_job_info")]  # it names users
    return json.dumps(names, indent=1)


def _small(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        raise ValueError("too large for a secret")
    return path.read_text(encoding="utf-8")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST).decode("utf-8", "replace")
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}\n"


def _output(run: Runner, argv: Sequence[str]) -> str:
    try:
        completed = run(list(argv), timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError as error:
        return f"{error}\n"
    return completed.stdout[:_LARGEST].decode("utf-8", "replace") + completed.stderr
