"""A checkpointed process is dumped with CRIU on one node and restored on the GPUs of another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def criu() -> str:
    """A CRIU that supports this: 4.0 or newer, from the variable CRIU or the path."""
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    program = os.environ.get("CRIU") or shutil.which("criu")
    if program is None:
        pytest.skip("criu is not installed")
    output = subprocess.run([program, "--version"], check=False, capture_output=True, text=True, timeout=240).stdout
    version = re.search(r"Version: (\d+)", output)
    if version is None or int(version[1]) < 4:
        pytest.skip(f"criu is older than 4.0: {output.strip()}")
    return program


@pytest.mark.slow
def test_process_is_restored_on_another_node(emulator_build: Path, tmp_path: Path, criu: str) -> None:
    """With real CRIU, pynvml and cuda-bindings; a dump while it holds a GPU is refused; device memory is unchanged."""
    for side in ("dump", "restore"):
        script = [HERE / "criu-roundtrip.sh", side, emulator_build, tmp_path, sys.executable, HERE / "traveller.py"]
        ran = subprocess.run(
            ["unshare", "--pid", "--mount", "--fork", "--kill-child", *map(str, script)],
            env={**{key: value for key, value in os.environ.items() if key != "GPU_EMULATOR_STATE"}, "CRIU": criu},
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )
        logs = "".join(path.read_text(errors="replace")[-2000:] for path in tmp_path.glob("*/log"))
        assert ran.returncode == 0, f"{side}: {ran.stdout}{ran.stderr}{logs}"
    assert "Can't dump file" in (tmp_path / "refused" / "log").read_text(errors="replace")
    assert (tmp_path / "done").read_text() == f"True {20 + 2000 + 414 + 2}"
    gpus = json.loads((tmp_path / "show.json").read_text())["gpus"]
    assert [len(gpu["processes"]) for gpu in gpus] == [0, 1]
