"""The owner of the jobs of tests: root acts for an ordinary user, and never for root."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.user_files import User

OWNER = User(65534, 65534) if os.geteuid() == 0 else User(os.geteuid(), os.getegid())
"""Another user than root, or the one who runs the tests."""
BECOME_OWNER = f"os.setgroups(()); os.setgid({OWNER.gid}); os.setuid({OWNER.uid})\n" if os.geteuid() == 0 else ""
"""A line of a Python program, after its imports, which the owner may not be able to read: it then runs as the owner."""


def hand_over(*paths: Path) -> None:
    """Give the owner files, and everything below them, that belong to the user who runs the tests."""
    for path in paths if os.geteuid() == 0 else ():
        _give(path)
        for directory, below, files in os.walk(path):
            for name in (*below, *files):
                _give(Path(directory, name))


def _give(path: Path) -> None:
    if path.lstat().st_uid == 0:
        os.chown(path, OWNER.uid, OWNER.gid, follow_symlinks=False)


@contextmanager
def using(path: Path, how: str = "open") -> Iterator[int]:
    """Run a program of the owner that has a file ``open`` or ``mapped``; return its PID."""
    code = f"import mmap, os, sys\n{BECOME_OWNER}fd = os.open(sys.argv[1], os.O_RDWR)\n"
    code += "kept = mmap.mmap(fd, 0)\nos.close(fd)\n" if how == "mapped" else ""
    code += "print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"\n"
        try:
            yield program.pid
        finally:
            program.communicate()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Return an empty directory that every user may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)
