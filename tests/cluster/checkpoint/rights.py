"""``drive.py`` for tests of the rights of a restored tree."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from drive import Driven, serve
from session import HERE, PYTHON, UID, members

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.interface import Pages, Take

KEYCTL, ADD_KEY, SESSION = 250, 248, -3  # x86_64; KEY_SPEC_SESSION_KEYRING
KEY = (b"user", b"checkpoint-test-of-root")


class Rights(Driven):
    """A session with supplementary groups and kernel keys."""

    watcher: subprocess.Popen[bytes] | None = None

    def with_groups(self, groups: list[int]) -> None:
        """Set the supplementary groups of the user of the next attempt."""
        self.groups = groups

    def rights(self) -> list[list[int]]:
        """Return the supplementary groups of each process."""
        result = []
        for pid in self.pids():
            with Process(pid) as process:
                result.append(sorted(int(word) for word in process.status()["Groups"].split()))
        return result

    def pids(self) -> list[int]:
        """Return the PIDs of the namespace's processes in this PID namespace."""
        return [pid for _, pid in sorted(members(self.init).items())]

    def plant_key(self) -> int:
        """Add a key of root to the session keyring of this process, as the login of an administrator may do."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(KEYCTL, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING
        made = int(libc.syscall(ADD_KEY, *KEY, b"secret", 6, SESSION))
        assert made > 0, os.strerror(ctypes.get_errno())
        return made

    def restore_watched(self) -> dict[str, Any]:
        """Restore with a slow verification while another process of the user tries to trace the tree."""
        report = self.work / "watched"
        argv = [PYTHON, str(HERE / "watcher.py"), str(UID), str(report)]
        self.watcher = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.watcher.stdout is not None
        self.watcher.stdout.readline()
        self.restore()
        record: dict[str, Any] = json.loads(report.read_text())
        return record

    def verified(self, pages: Pages) -> Pages:
        """Extend the verification by two seconds and then wait for the watcher, if there is one."""
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
