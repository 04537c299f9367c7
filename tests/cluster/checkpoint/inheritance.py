"""Determine which attributes a restored process inherits from the parent of CRIU. Runs in a container, prints JSON.

A process is dumped once, and restored by CRIU once per setting that systemd could apply to the agent; it then reports
its own attributes. The settings are applied with the same system calls as in systemd.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
UID = 2001
DEADLINE_S = 30.0
FACTS = ("CapBnd", "CapEff", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Umask")
LAST_PID = 300
"""Last PID in the namespace before a restore, so that CRIU and its helpers get higher PIDs."""
_CLONE_NEWUTS, _CLONE_NEWIPC = 0x04000000, 0x08000000
_SYS_NICE, _SYS_TIME = 23, 25  # capabilities
_CLOCK_SETTIME = {"x86_64": 227, "aarch64": 112}[os.uname().machine]
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
_SYS_IOPRIO = {"x86_64": (251, 252), "aarch64": (30, 31)}[os.uname().machine]


def call(number: int) -> None:
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def prctl(option: int, *arguments: int) -> int:
    return int(LIBC.prctl(option, *(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4])))


def filtered() -> None:
    """Deny clock_settime, as ``ProtectClock=`` does; allow everything else."""
    steps = ((0x20, 0, 0, 0), (0x15, 0, 1, _CLOCK_SETTIME), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    call(LIBC.syscall(_SYS_SECCOMP, 1, 0, ctypes.create_string_buffer(program)))


SETTINGS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "NoNewPrivileges": lambda: call(prctl(38, 1)),
    "CapabilityBoundingSet": lambda: call(prctl(24, _SYS_NICE)),
    "ProtectClock": lambda: call(prctl(24, _SYS_TIME)),
    "SystemCallFilter": filtered,
    "MemoryDenyWriteExecute": lambda: call(prctl(65, 1)),
    "ProtectHostname": lambda: call(LIBC.unshare(_CLONE_NEWUTS)),
    "PrivateIPC": lambda: call(LIBC.unshare(_CLONE_NEWIPC)),
    "OOMScoreAdjust": lambda: Path("/proc/self/oom_score_adj").write_text("300"),
    "IOSchedulingClass": lambda: call(LIBC.syscall(_SYS_IOPRIO[0], 1, 0, 3 << 13)),
    "TimerSlackNSec": lambda: call(prctl(29, 1_000_000)),
    "CoredumpFilter": lambda: Path("/proc/self/coredump_filter").write_text("0x7f"),
    "Personality": lambda: call(LIBC.personality(0x0040000)),
    "UMask": lambda: os.umask(0o077),
    "Nice": lambda: os.nice(5),
    "LimitCORE": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY)),
}


def seen() -> dict[str, object]:
    """Return the attributes of this process."""
    rows = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    texts: dict[str, object] = {key: value.strip() for key, _, value in rows if key in FACTS}
    for name in ("oom_score_adj", "coredump_filter", "personality", "timerslack_ns"):
        texts[name] = Path("/proc/self", name).read_text().strip()
    for kind in ("uts", "ipc", "net", "cgroup", "user"):
        texts[f"{kind} namespace"] = str(Path("/proc/self/ns", kind).readlink())
    texts["limits"] = [resource.getrlimit(kind) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_STACK)]
    texts["nice"], texts["I/O priority"] = os.nice(0), LIBC.syscall(_SYS_IOPRIO[1], 1, 0)
    return texts


def sleeper(work: Path) -> None:
    """Wait for a file, then report the attributes of this process."""
    os.closerange(0, 64)
    os.open("/dev/null", os.O_RDWR)
    os.dup2(0, 1)
    os.dup2(0, 2)
    while not (work / "go").exists():
        time.sleep(0.02)
    (work / "seen.new").write_text(json.dumps(seen()))
    (work / "seen.new").rename(work / "seen")
    time.sleep(600)


def wait_for(probe: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (result := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)
    return result


class Container:
    """PID and mount namespaces with an init that only reaps."""

    def __init__(self) -> None:
        self._up = subprocess.Popen(
            ("unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child=KILL",
             "tini", "-s", "--", "sleep", "600"),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        children = Path(f"/proc/{self._up.pid}/task/{self._up.pid}/children")
        self.init = int(wait_for(lambda: children.read_text().split() or None)[0])
        wait_for(lambda: Path(f"/proc/{self.init}/task/{self.init}/children").read_text().split())

    def inside(self, *argv: str) -> tuple[str, ...]:
        return ("nsenter", f"--target={self.init}", "--pid", "--mount", "--", *argv)

    def end(self) -> None:
        os.kill(self.init, signal.SIGKILL)
        self._up.wait()


COMMON = ("--manage-cgroups=ignore", "--shell-job", "-v2")


def dump(work: Path) -> dict[str, object]:
    """Dump a sleeper; return its attributes after it has continued."""
    container = Container()
    try:
        me = (sys.executable, "-S", __file__, "sleeper", str(work))
        user = ("setpriv", f"--reuid={UID}", f"--regid={UID}", f"--groups={UID}", "--")
        # Its descriptors have to belong to the mounts of its namespace.
        shell = 'exec setsid "$@" </dev/null >/dev/null 2>&1'
        started = subprocess.Popen(container.inside("sh", "-c", shell, "sh", *user, *me))
        inner = wait_for(lambda: _inner(container.init, "sleeper"))
        subprocess.run(
            container.inside(
                "criu", "dump", f"--tree={inner}", f"--images-dir={work}/image", "--leave-running", *COMMON
            ),
            check=True, timeout=DEADLINE_S,
        )  # fmt: skip
        attributes = _attributes(work)
    finally:
        container.end()
    started.wait()
    return attributes


def _inner(init: int, word: str) -> int | None:
    space = Path(f"/proc/{init}/ns/pid").readlink()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "ns/pid").readlink() == space and f"\0{word}\0" in (path / "cmdline").read_text():
                return int((path / "status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])
        except OSError:
            continue
    return None


def _attributes(work: Path) -> dict[str, object]:
    (work / "go").touch()
    wait_for((work / "seen").exists)
    return dict(json.loads((work / "seen").read_text()))


def restored(work: Path, setting: str) -> dict[str, object] | None:
    """Return the attributes of the sleeper restored below a process with a setting; ``None``: the restore failed."""
    for name in ("go", "seen"):
        (work / name).unlink(missing_ok=True)
    container = Container()
    try:
        last = f"echo {LAST_PID} >/proc/sys/kernel/ns_last_pid"
        subprocess.run(container.inside("sh", "-c", last), check=True, timeout=DEADLINE_S)
        words = ("restore", f"--images-dir={work}/image", f"--work-dir={work}", "--restore-detached", *COMMON)
        done = subprocess.run(
            (sys.executable, "-S", __file__, "set", setting, *container.inside("criu", *words)),
            check=False, timeout=DEADLINE_S, capture_output=True,
        )  # fmt: skip
        return _attributes(work) if done.returncode == 0 else None
    finally:
        container.end()


def main(arguments: list[str]) -> int:
    match arguments:
        case ["sleeper", work]:
            sleeper(Path(work))
        case ["set", name, *argv]:
            SETTINGS[name]()
            os.execvp(argv[0], argv)  # noqa: S606 - criu, as a child of this process, which has the setting
        case _:
            work = Path(tempfile.mkdtemp(prefix="inheritance-", dir="/var/tmp"))
            try:
                work.chmod(0o777)
                (work / "image").mkdir(0o755)
                before = dump(work)
                result = {}
                for name in SETTINGS:
                    after = restored(work, name)
                    result[name] = None if after is None else sorted(k for k in before if before[k] != after[k])
            finally:
                shutil.rmtree(work)
            print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
