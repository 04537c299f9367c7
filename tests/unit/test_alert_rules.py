"""The alert rules for Prometheus: promtool checks and tests them, and every metric in them is exported."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_affinode.engines.metric_table import EXPORTED_UP, exported_fields

ROOT = Path(__file__).parents[2]
RULES = ROOT / "reports" / "prometheus" / "serving.rules.yml"


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (package prometheus)")
    return found


def test_rules_are_valid(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_alerts_fire_on_overload_and_not_on_bursts(promtool: str) -> None:
    tests = ROOT / "tests" / "data" / "serving.rules.test.yml"
    done = subprocess.run([promtool, "test", "rules", tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_of_the_rules_are_exported() -> None:
    used = set(re.findall(r"\bslurm_affinode_serving_\w+", RULES.read_text()))
    assert used
    assert used <= {*exported_fields(), EXPORTED_UP}
