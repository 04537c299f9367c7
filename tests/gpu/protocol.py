"""How the tests talk to a program on the GPU: files in a directory, so that nothing ties it to who started it.

``N.do`` holds a command, ``N.said`` its answer, both JSON; each is written under another name and renamed. A program
has no pipe and no socket, so it can be dumped and restored; it ends by itself when its directory or its parent is gone
(PID 1 of its namespace where it is dumped and restored) or nobody has asked anything for a long time.
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
"""In the environment: who has started it, who may be gone before it gets to look."""
T = TypeVar("T")
LONELY_S = 1800.0
_LOOK_S = 0.01
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_ORPHAN_LOOKS = 500
"""Not seconds: it may have been an image meanwhile, and what was just restored is CRIU's child for a moment."""


def write(path: Path, value: Any) -> None:
    """All of it, or nothing."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.rename(path)


def built(directory: Path, build: Callable[[], T]) -> T:
    """What a program makes before it can answer. A failure is told, for its standard error goes nowhere."""
    try:
        return build()
    except Exception as error:
        write(directory / "ready", {"error": f"{type(error).__name__}: {error}"})
        raise


def serve(directory: Path, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until told to end."""
    parent, without_parent = int(os.environ.get(PARENT) or os.getppid()), 0
    write(directory / "ready", {"ok": None})
    for number in itertools.count():
        asked = directory / f"{number}.do"
        alone_at = time.monotonic() + LONELY_S
        while not asked.exists():
            without_parent = 0 if os.getppid() == parent else without_parent + 1
            if not directory.is_dir() or time.monotonic() > alone_at or without_parent > _ORPHAN_LOOKS:
                os._exit(1)  # it may be locked: what a library gives back at the end would wait for the unlock for ever
            time.sleep(_LOOK_S)
        command = json.loads(asked.read_text(encoding="utf-8"))
        name = command.pop("name")
        if name == "end":
            write(directory / f"{number}.said", {"ok": None})
            return
        try:
            answer = {"ok": commands[name](**command)}
        except Exception as error:  # the other side has to be told, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(directory / f"{number}.said", answer)


def detach() -> None:
    """Nothing open but /dev/null: no terminal, no pipe of whoever started it.

    And whoever is of the same user may look into it: the driver's checkpoint may ask for what ptrace does, and Ubuntu's
    kernel permits that to ancestors alone (ptrace_scope 1; elsewhere the call fails and is not needed).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    sys.stdout.flush()
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, 256)
