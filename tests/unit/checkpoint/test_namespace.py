"""Facts about a process in ``/proc``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import namespace

_NAMED = """import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["x\rNSpid: 9 1", "x\fPPid: 1", "x\vNSpid: 9 1", "NSpid: 9 1"])
def test_process_name_does_not_change_the_process_ids_read(name: str) -> None:
    """The first line has the process name, in which the kernel escapes newlines only."""
    argv = (sys.executable, "-c", _NAMED, name)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        told = (Path("/proc") / str(process.pid) / "status").read_bytes()
        assert told.startswith(f"Name:\t{name}\n".encode())
        expected = [int(word) for word in told.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()]
        assert namespace.inner_pid(process.pid) == expected[-1]
        assert namespace.parent(process.pid) == int(told.partition(b"\nPPid:")[2].split()[0])
        process.communicate()
