"""Reports of leftovers outlive the agent, and are removed when they are in the audit log."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.agent.hook_records import LeftoverReports
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.zombies import act

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)


def report(number: int, **more: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "node": "g1", "job": number, "uid": 1001, "at": NOW.timestamp(), "dirty": [],
            "left": [{"pid": 9, "command": "python", "ended_by": "SIGKILL"}], **more}  # fmt: skip


def test_next_agent_has_reports_in_order(tmp_path: Path) -> None:
    """They are kept until they are acknowledged; a repeated report replaces the earlier one."""
    path = tmp_path / "state" / "leftovers.jsonl"
    first = LeftoverReports(path)
    first.add(report(1))
    first.add(report(2))
    first.add(report(1, drained=True))
    second = LeftoverReports(path)
    assert second.all() == [report(1, drained=True), report(2)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert second.drop(["r1", "other"]) == 1
    assert [element["id"] for element in LeftoverReports(path).all()] == ["r2"]


def test_number_of_reports_is_limited_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The oldest report is dropped."""
    reports = LeftoverReports(tmp_path / "x", most=2)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            reports.add(report(number))
    assert [element["job"] for element in LeftoverReports(tmp_path / "x").all()] == [1, 2]
    assert "leftovers of job 0 is dropped" in caplog.text


def test_damage_and_full_disk_do_not_block_epilog(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Readable reports count; unwritable ones stay in memory; both cases are logged."""
    path = tmp_path / "x"
    path.write_text(f"{json.dumps(report(1))}\n{{torn\n[]\n")
    assert [element["job"] for element in LeftoverReports(path).all()] == [1]
    assert "x:2: not a report" in caplog.text
    nowhere = LeftoverReports(path / "below-a-file" / "y")
    nowhere.add(report(3))
    assert [element["job"] for element in nowhere.all()] == [3]
    assert "cannot be written" in caplog.text


def test_report_is_removed_when_it_is_in_audit_log(tmp_path: Path) -> None:
    """A dry run removes none, nor does a run while another one has claimed the report; each is logged once."""
    agent = LeftoverReports(tmp_path / "x")
    agent.add(report(1))
    agent.add(report(2))

    def ask(node: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if node != "g1":
            raise UnreachableError("no route")
        if request["verb"] == "leftovers-taken":
            return {"taken": agent.drop(request["ids"])}
        return {"reports": agent.all()}

    with Repository.open(f"sqlite:///{tmp_path / 'a.sqlite'}") as store:
        log = ZombieLog(store.engine)
        assert log.claim("epilog|g1|r2", "another", NOW, timedelta(minutes=10))
        assert act.collect(["g1", "g2"], ask, "c", log, now=NOW, run="1", forget=False) == 1
        assert len(agent.all()) == 2
        assert act.collect(["g1"], ask, "c", log, now=NOW, run="2") == 0
        assert [element["id"] for element in agent.all()] == ["r2"]
        later = NOW + timedelta(hours=1)
        assert act.collect(["g1"], ask, "c", log, now=later, run="3") == 1
        assert agent.all() == []
        assert [(action.verb, action.job) for action in log.history()] == [("epilog", "1"), ("epilog", "2")]
