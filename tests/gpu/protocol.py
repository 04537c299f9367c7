"""The protocol between the tests and a program on the GPU: files in a directory, so that nothing ties it to its parent.

``N.do`` holds a command, ``N.reply`` its answer, both as JSON; each is written under another name and renamed. Without
pipes and sockets, a program can be dumped and restored. It exits if its directory or its parent is gone (the parent
is PID 1 of its namespace if it is dumped and restored), or after a long time without a command.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

PARENT = "GPU_TEST_PARENT"
"""Environment variable with the PID of the parent, which may end before the program can read it."""
T = TypeVar("T")
LONELY_S = 1800.0
_POLL_S = 0.01
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_ORPHAN_POLLS = 500
"""Not in seconds: the program may have been an image meanwhile, and a restored process is briefly a child of CRIU."""


def write(path: Path, value: Any) -> None:
    """Write the whole file atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.rename(path)


def built(directory: Path, build: Callable[[], T]) -> T:
    """Build the objects that a program needs. An error is sent as its answer, as its standard error is discarded."""
    try:
        return build()
    except Exception as error:
        write(directory / "ready", {"error": f"{type(error).__name__}: {error}"})
        raise


def serve(directory: Path, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Execute commands until ``end``."""
    parent, without_parent = int(os.environ.get(PARENT) or os.getppid()), 0
    write(directory / "ready", {"ok": None})
    for number in itertools.count():
        command_file = directory / f"{number}.do"
        alone_at = time.monotonic() + LONELY_S
        while not command_file.exists():
            without_parent = 0 if os.getppid() == parent else without_parent + 1
            if not directory.is_dir() or time.monotonic() > alone_at or without_parent > _ORPHAN_POLLS:
                os._exit(1)  # the process may be locked: exit handlers of libraries would wait for the unlock forever
            time.sleep(_POLL_S)
        command = json.loads(command_file.read_text(encoding="utf-8"))
        name = command.pop("name")
        if name == "end":
            write(directory / f"{number}.reply", {"ok": None})
            return
        try:
            answer = {"ok": commands[name](**command)}
        except Exception as error:  # send any error to the other side
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(directory / f"{number}.reply", answer)


def detach() -> None:
    """Keep only /dev/null open: no terminal, no pipe of the parent.

    And allow all processes of the same user to trace it: the driver's checkpoint may need the rights of ptrace, which
    Ubuntu's kernel grants only to ancestors (ptrace_scope 1; elsewhere the call fails and is not needed).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    sys.stdout.flush()
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, 256)
