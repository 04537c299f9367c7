"""The only place that runs another program: no shell, a timeout always, standard error kept."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_affinode.errors import UnreachableError


@dataclass(frozen=True, slots=True)
class Completed:
    """What a program left behind: exit status, standard output as bytes, standard error as text."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: str


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    stdin: bytes | None = None,
) -> Completed:
    """Run ``argv`` and return its output.

    Raises ``UnreachableError`` where the program is missing, runs past ``timeout_s`` seconds or, with ``check``,
    ends with a status other than 0; the message carries the last line that the program wrote on standard error.
    """
    name = argv[0]
    try:
        done = subprocess.run(  # noqa: S603 - argv is a list that our own code builds; there is no shell
            list(argv),
            capture_output=True,
            timeout=timeout_s,
            env=None if env is None else dict(env),
            input=stdin if stdin is not None else b"",
            check=False,
        )
    except FileNotFoundError as error:
        raise UnreachableError(
            f"{name}: no such program", hint=f"install the package that has {name}, or put it on PATH"
        ) from error
    except PermissionError as error:
        raise UnreachableError(f"{name}: not allowed to run it") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{name}: no answer within {timeout_s:g} s") from error
    stderr = done.stderr.decode("utf-8", "backslashreplace")
    if check and done.returncode != 0:
        lines = [line for line in stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "it said nothing"
        raise UnreachableError(f"{name} ended with status {done.returncode}: {said}")
    return Completed(tuple(argv), done.returncode, done.stdout, stderr)
