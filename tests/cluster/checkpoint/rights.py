"""``drive.py`` for stories about the rights of a restored tree."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from drive import Driven, serve
from session import HERE, PYTHON, UID

from slurm_affinode.checkpoint import namespace
from slurm_affinode.checkpoint.interface import Pages, Take
from slurm_affinode.pinned import Process

KEYCTL, ADD_KEY, SESSION = 250, 248, -3  # x86_64; KEY_SPEC_SESSION_KEYRING
KEY = (b"user", b"checkpoint-test-of-root")


class Rights(Driven):
    """Runs with groups and keys."""

    watcher: subprocess.Popen[bytes] | None = None

    def with_groups(self, groups: list[int]) -> None:
        """Those of the next run's user."""
        self.groups = groups

    def rights(self) -> list[list[int]]:
        """Supplementary groups of each process."""
        found = []
        for pid in self.pids():
            with Process(pid) as process:
                found.append(sorted(int(word) for word in process.status()["Groups"].split()))
        return found

    def pids(self) -> list[int]:
        """Processes of the namespace, by their numbers here."""
        return [pid for _, pid in sorted(namespace.members(self.init).items())]

    def plant_key(self) -> int:
        """A key of root's in the session keyring of this process, as an administrator's login may have left it."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(KEYCTL, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING
        made = int(libc.syscall(ADD_KEY, *KEY, b"secret", 6, SESSION))
        assert made > 0, os.strerror(ctypes.get_errno())
        return made

    def restore_watched(self) -> dict[str, Any]:
        """A restore that takes its time to verify, while another process of the user tries to trace its tree."""
        told = self.work / "watched"
        argv = [PYTHON, str(HERE / "watcher.py"), str(UID), str(told)]
        self.watcher = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.watcher.stdout is not None
        self.watcher.stdout.readline()
        self.restore()
        found: dict[str, Any] = json.loads(told.read_text())
        return found

    def verified(self, pages: Pages) -> Pages:
        """While somebody watches it takes two seconds more, to the end of which there is a watcher."""
        watcher = self.watcher
        if watcher is None:
            return pages

        class Slow:
            def begin(self, take: Take | None = None) -> None:
                pages.begin(take)

            def sound(self, timeout_s: float | None = None) -> None:
                pages.sound(timeout_s)
                time.sleep(2)
                watcher.communicate(timeout=60)

            def check(self, path: str, blocks: Iterable[memoryview]) -> None:
                pages.check(path, blocks)

        return Slow()


if __name__ == "__main__":
    serve(Rights)
