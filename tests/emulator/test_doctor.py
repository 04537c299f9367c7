"""`slurm-affinode doctor` on machines with different drivers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulator.node import Node

PROGRAM = "import sys; from slurm_affinode.cli.entry import main; sys.exit(main())"
DRIVERS = [("560.35.03", 0), ("570.124.06", 3), ("580.95.05", 4), ("615.71.05", 6)]


def doctor(node: Node, home: Path, *arguments: str) -> str:
    """Return the output of doctor."""
    env = {**node.env, "SLURM_AFFINODE_STATE_DIR": str(home)}
    command = [sys.executable, "-c", PROGRAM, "doctor", *arguments]
    return subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=240).stdout


@pytest.mark.parametrize(("version", "count"), DRIVERS)
def test_table_follows_driver(node: Node, tmp_path: Path, version: str, count: int) -> None:
    node.ctl("driver", version)
    cuda: dict[str, Any] = json.loads(doctor(node, tmp_path, "--json"))["cuda"]
    assert (cuda["driver"], len(cuda["gpus"])) == (version, 2)
    assert sum(feature["available"] for feature in cuda["features"]) == count
    assert cuda["checkpoint"] == (count > 0)
    assert all(feature["available"] or f"({feature['since']} " in feature["why"] for feature in cuda["features"])


def test_text_has_same_table_as_json(node: Node, tmp_path: Path) -> None:
    """Below the version of the driver, with the same words as in JSON."""
    node.ctl("driver", "610.57.04")
    cuda = json.loads(doctor(node, tmp_path, "--json"))["cuda"]
    shown = doctor(node, tmp_path)
    assert "NVIDIA driver 610.57.04, CUDA 13.3" in shown
    for feature in cuda["features"]:
        line = next(line for line in shown.splitlines() if line.startswith(f"{feature['name']} "))
        since, used_for, here = re.split(r"\s{2,}", line.split(feature["name"], 1)[1].strip())[:3]
        assert (since, used_for) == (str(feature["since"]), feature["used_for"])
        assert here.split()[0] == ("yes" if feature["available"] else "no")
        assert feature["why"][:60] in line


def test_driver_without_checkpoint_is_problem(node: Node, tmp_path: Path) -> None:
    """A machine with a driver that cannot suspend is reported."""
    node.ctl("driver", "560.35.03")
    checks = json.loads(doctor(node, tmp_path, "--json"))["checks"]
    check = next(item for item in checks if item["name"] == "CUDA checkpoint")
    assert check["status"] == "problem"
    assert "cuCheckpointProcessLock" in check["detail"]
    assert "570" in check["hint"]
