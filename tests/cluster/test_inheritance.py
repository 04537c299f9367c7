"""Attributes that a restored process inherits from the parent of CRIU.

They are the reason why the agent's unit lacks most sandbox settings.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cluster.driver import Cluster

pytestmark = [pytest.mark.cluster]

SOURCE = Path(__file__).with_name("checkpoint") / "inheritance.py"
TARGET = "/usr/local/share/inheritance.py"
FAILS = None
INHERITED = {
    "nothing": [],
    # Settings that do not apply to the agent.
    "NoNewPrivileges": ["NoNewPrivs"],
    "CapabilityBoundingSet": ["CapBnd"],
    "ProtectClock": FAILS,
    "SystemCallFilter": ["Seccomp", "Seccomp_filters"],
    "MemoryDenyWriteExecute": FAILS,
    "ProtectHostname": ["uts namespace"],
    "PrivateIPC": ["ipc namespace"],
    "OOMScoreAdjust": ["oom_score_adj"],
    "IOSchedulingClass": ["I/O priority"],
    "TimerSlackNSec": ["timerslack_ns"],
    "CoredumpFilter": ["coredump_filter"],
    "Personality": ["personality"],
    # CRIU restores these.
    "UMask": [],
    "Nice": [],
    "LimitCORE": [],
}
"""Setting -> attributes of the restored process that differ from before; ``FAILS``: it cannot be restored."""


def test_restored_process_inherits_from_parent_of_criu(cluster: Cluster) -> None:
    """``unit/test_units.py`` forbids these settings. They can be allowed once CRIU restores these attributes."""
    container = cluster.container("c1")
    subprocess.run(("docker", "cp", "--quiet", str(SOURCE), f"{container}:{TARGET}"), check=True, timeout=60)
    done = subprocess.run(
        ("docker", "exec", container, "python3", "-S", TARGET), capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == INHERITED
