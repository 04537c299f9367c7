"""The rules for Prometheus: promtool checks them, and tests them on synthetic series."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from servers import program_of

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "deploy" / "prometheus").glob("*.rules.yml"))


def cases_of(rules: Path) -> Path:
    return ROOT / "tests" / "data" / f"rules-{rules.name.partition('.')[0]}.test.yml"


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([program_of("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rules", RULES, ids=lambda path: path.name)
def test_rules_are_valid(rules: Path) -> None:
    promtool("check", "rules", rules)


@pytest.mark.parametrize("rules", RULES, ids=lambda path: path.name)
def test_alerts_fire_when_they_should_and_not_otherwise(rules: Path) -> None:
    promtool("test", "rules", cases_of(rules))


@pytest.mark.parametrize("rules", RULES, ids=lambda path: path.name)
def test_every_alert_is_tested(rules: Path) -> None:
    """Each is expected to fire in one of the tests."""
    alerts = set(re.findall(r"- alert: (\w+)", rules.read_text(encoding="utf-8")))
    fired = set()
    for part in cases_of(rules).read_text(encoding="utf-8").split("alertname: ")[1:]:
        if "exp_labels" in part:
            fired.add(part.split()[0].rstrip(","))
    assert fired == alerts
