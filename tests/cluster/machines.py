"""Containers that stand for machines of a site: commands run as root or as another user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class Machine:
    """A running container."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, command: str, status: int = 0, *, user: str = "root", directory: str = "/") -> str:
        """Run a shell command; return its output with errors, after a check of the exit status."""
        options = ["--env", "DEBIAN_FRONTEND=noninteractive", "--user", user, "--workdir", directory]
        argv = ["docker", "exec", *options, self._name, "sh", "-c", command]
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=400
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout


@contextmanager
def container(
    name: str, image: str, *command: str, volumes: Mapping[Path, str], options: Sequence[str] = ()
) -> Iterator[Machine]:
    """Run a container of ``image``. ``volumes``: directory of this machine -> its read-only place in the container."""
    name = f"{name}-{os.getpid()}"
    mounts = [word for place, target in volumes.items() for word in ("--volume", f"{place}:{target}:ro")]
    argv = ["docker", "run", "--rm", "--detach", "--name", name, *mounts, *options, image, *command]
    subprocess.run(argv, check=True, timeout=60, stdout=sys.stderr)
    try:
        yield Machine(name)
    finally:
        subprocess.run(["docker", "rm", "--force", name], check=True, timeout=60, stdout=sys.stderr)
