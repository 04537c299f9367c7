"""docs/prometheus.md: its commands run against a real Prometheus, and promtool accepts its files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.database

PAGE = Path(__file__).resolve().parents[2] / "docs" / "prometheus.md"
URL, DATA = "http://prometheus:9090", "/var/lib/prometheus/metrics2"


def blocks(kind: str) -> list[str]:
    """Return the blocks of the page in a language."""
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(900)  # these commands take minutes beside the tests on clusters
def test_commands_of_the_page_run(prometheus_of: Callable[..., str], tmp_path: Path) -> None:
    """Unchanged except for the server's address and directory; the written-back samples are TSDB blocks."""
    labels = 'gpu="0",UUID="GPU-1",Hostname="gpu01",cluster="alpha"'
    begin = int(time.time()) // 60 * 60 - 86400
    lines = [f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} 50 {at}\n" for at in range(begin, begin + 70_000, 60)]
    url = prometheus_of("# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n" + "".join(lines) + "# EOF\n")
    data = tmp_path / "data"
    sacct = "JobIDRaw|Cluster|State|Submit|Start|End|AllocTRES|NodeList\n"
    at = [time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(begin + hours * 3600)) for hours in (5, 6)]
    (tmp_path / "sacct.txt").write_text(f"{sacct}1|alpha|COMPLETED|{at[0]}|{at[0]}|{at[1]}|gres/gpu=1|gpu01\n")
    script = "\n".join(blocks("sh")).replace(URL, url).replace(DATA, str(data))
    assert script.count(url) == 3
    assert str(data) in script
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TZ": "UTC"}
    env |= {"SLURM_AFFINODE_STATE": str(tmp_path / "state")}
    env.pop("SLURM_AFFINODE_DB", None)
    script = f"slurm-affinode ingest sacct sacct.txt\n{script}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "report" / "report.html").exists()
    assert list(data.glob("*/meta.json"))


def test_files_of_the_page_are_valid(tmp_path: Path) -> None:
    """promtool accepts the configuration and the rules."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    [config] = blocks("yaml")
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copytree(PAGE.parents[1] / "deploy" / "prometheus", tmp_path / "slurm-affinode")
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == 3
