"""``zombies warn``, ``clean``, ``policy`` and ``history``, and ``keep``."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import NODE
from agent_stand_ins import job as slurm_job
from click.testing import CliRunner, Result
from zombie_samples import NOW, job, squatter

from slurm_affinode.base import extras
from slurm_affinode.base.config import Config
from slurm_affinode.base.text import counted
from slurm_affinode.cli import keep
from slurm_affinode.cli.main import cli
from slurm_affinode.cli.zombies_clean import CleanUpRequest, Session
from slurm_affinode.model.cleanup import Policy
from slurm_affinode.zombies import find


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days of a synthetic cluster."""
    out = tmp_path_factory.mktemp("zombies")
    result = CliRunner().invoke(cli, ["demo", "--days", "2", "--trend", "0", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out / "state"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"}, standalone_mode=False)


def status(result: Result) -> int:
    """Return the exit status as ``main`` sets it."""
    if result.exception is not None:
        return int(getattr(result.exception, "exit_code", 70))
    return int(result.return_value or 0)


def output_of(result: Result) -> str:
    return result.output + str(result.exception or "")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "z.toml"
    path.write_text('[evidence]\nmax_age = "5000d"\n[[rule]]\nname = "idle"\nkinds = ["squatter", "idle-allocation"]\n'
                    'action = "cancel"\nfixed = { first_warning = "1h", cancel = "2h" }\n'
                    'sliding = { first_warning = "1h", cancel = "2h" }\n')  # fmt: skip
    return path


def test_clean_without_yes_takes_no_action(state: Path, policy: Path) -> None:
    """It lists the planned actions; the audit log records only that the findings were listed."""
    base = ("--state", str(state), "--slurm-backend", "commands", "--policy", str(policy), "--json")
    result = run("zombies", "clean", "--warn", *base)
    assert status(result) == 0, output_of(result)
    record = json.loads(result.stdout)
    assert record["dry_run"]
    assert {action["result"] for action in record["actions"]} <= {"planned", "spared"}
    assert any(action["verb"] == "warn-user" for action in record["actions"])
    rows = json.loads(run("zombies", "history", "--state", str(state), "--json").stdout)
    assert {row["verb"] for row in rows} == {"look"}


def test_clean_without_slurm_takes_no_action(state: Path, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exemptions requested by owners are unknown then."""
    monkeypatch.setenv("PATH", "/nowhere")
    base = ("--state", str(state), "--slurm-backend", "commands", "--policy", str(policy))
    result = run("zombies", "clean", "--warn", "--yes", *base)
    assert status(result) == 3


def test_dry_run_prints_mails(state: Path, policy: Path) -> None:
    """With recipient and complete text; with ``--json`` as values."""
    words = ("zombies", "warn", "--dry-run", "--state", str(state), "--slurm-backend", "commands", "--policy")
    result = run(*words, str(policy))
    assert status(result) == 0
    assert re.search(r"^To: \S+\nSubject: \[", result.stdout, re.MULTILINE)
    assert "What you can do" in result.stdout
    policy.write_text(policy.read_text() + '[default]\nwarn_admins = true\n[mail]\nadmins = ["ops@example.org"]\n')
    mails = json.loads(run(*words, str(policy), "--json").stdout)["mails"]
    users = [mail["user"] for mail in mails if mail["recipient"] == mail["user"]]
    assert users
    assert sorted((mail["user"], mail["recipient"]) for mail in mails) == sorted(
        (user, to) for user in users for to in (user, "ops@example.org")
    )
    assert all("What you can do" in mail["text"] and mail["html"].startswith("<!doctype") for mail in mails)


def test_clean_reports_pending_warnings(state: Path, policy: Path) -> None:
    """Without ``--warn``, they are not in the table but counted."""
    result = run("zombies", "clean", "--state", str(state), "--slurm-backend", "commands", "--policy", str(policy))
    assert re.search(r"^\d+ findings?, .* of [1-9]\d* users are to be warned \(--warn\)$", result.stdout, re.MULTILINE)


def test_stale_evidence_has_its_own_code(state: Path) -> None:
    """The built-in policy, with metrics that ended long ago."""
    result = run("zombies", "clean", "--warn", "--state", str(state), "--slurm-backend", "commands", "--json",
                 "--kind", "squatter")  # fmt: skip
    assert {action["code"] for action in json.loads(result.stdout)["actions"]} <= {"stale"}


@pytest.mark.parametrize("command", ["clean", "warn"])
def test_stale_evidence_is_summarized_in_one_line(state: Path, command: str) -> None:
    """``--all`` lists every job."""
    words = ["--state", str(state), "--slurm-backend", "commands", "--kind", "squatter"]
    result = run("zombies", command, *words, *(["--warn"] if command == "clean" else []))
    assert status(result) == 2
    assert "stale" not in result.stdout
    assert output_of(result).count("too old to act on") == 1
    everything = run("zombies", command, *words, "--all", *(["--warn"] if command == "clean" else []))
    assert "stale" in everything.stdout


def test_warn_uses_the_requested_interval(state: Path) -> None:
    """As ``list`` does."""
    words = ["--state", str(state), "--slurm-backend", "commands", "--json"]
    until = json.loads(run("zombies", "list", *words).stdout)["until"]
    earlier = f"{datetime.fromisoformat(until) - timedelta(hours=6):%Y-%m-%dT%H:%M:%SZ}"
    for command in ("list", "warn"):
        seen = json.loads(run("zombies", command, *words, "--until", earlier).stdout)
        assert datetime.fromisoformat(seen["until"]) == datetime.fromisoformat(earlier)


def test_over_limit_requires_a_terminal(state: Path, policy: Path) -> None:
    result = run("zombies", "clean", "--over-limit", "50", "--yes", "--state", str(state), "--policy", str(policy))
    assert status(result) == 2
    assert "needs a terminal" in output_of(result)


# --- policy


def test_policy_check_reports_every_error_by_line(tmp_path: Path) -> None:
    """Exit status 1: errors; 2: the file cannot be read."""
    path = tmp_path / "z.toml"
    path.write_text('[limits]\ncancle = 1\n\n[default]\naction = "x"\n')
    result = run("zombies", "policy", "check", str(path))
    assert status(result) == 1
    assert f"{path}:2: limits.cancle: unknown key" in result.stdout
    assert f"{path}:5: default.action" in result.stdout
    record = json.loads(run("zombies", "policy", "check", str(path), "--json").stdout)
    assert [fault["line"] for fault in record["faults"]] == [2, 5]
    assert status(run("zombies", "policy", "check", str(tmp_path / "none"))) == 2
    assert "z.toml:2: limits.cancle" in output_of(run("zombies", "clean", "--policy", str(path)))


def test_policy_check_replays_the_history(state: Path, policy: Path) -> None:
    """The output lists the actions that would have been taken up to the end of the history."""
    listed = json.loads(run("zombies", "list", "--state", str(state), "--slurm-backend", "commands", "--json").stdout)
    until = listed["until"]
    result = run("zombies", "policy", "check", str(policy), "--state", str(state), "--json", "--until", until,
                 "--since", listed["since"], "--look-every", "6h", "--every", "30m")  # fmt: skip
    assert status(result) == 0, output_of(result)
    record = json.loads(result.stdout)
    assert record["replay"], record
    assert {action["verb"] for action in record["replay"]} >= {"warn-user"}
    text = run("zombies", "policy", "check", str(policy), "--state", str(state), "--until", until, "--since",
               listed["since"], "--look-every", "12h", "--every", "1h").stdout  # fmt: skip
    assert "it would have done:" in text
    assert "no mistakes" in text
    short = run("zombies", "policy", "check", str(policy), "--state", str(state), "--until", until, "--since",
                listed["since"], "--look-every", "10d", "--every", "1h").stdout  # fmt: skip
    assert "warn-user" in short


def test_policy_check_without_history_reports_it(tmp_path: Path, policy: Path) -> None:
    """The exit status is 0."""
    result = run("zombies", "policy", "check", str(policy), "--state", str(tmp_path / "empty"), "--look-every", "3d")
    assert status(result) == 0
    assert "the replay is not possible: " in result.stderr


def test_policy_show_prints_a_valid_policy(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(run("zombies", "policy", "show").stdout)
    assert status(run("zombies", "policy", "check", str(path), "--no-replay")) == 0


# --- keep


class Slurm:
    """A slurmctld with one job."""

    def __init__(self, **values: Any) -> None:
        self.only_job = slurm_job(7, **values)
        self.comments: list[str] = []
        self.node = NODE

    def job(self, name: str) -> Any:
        return self.only_job

    def set_comment(self, name: str, text: str) -> None:
        self.comments.append(text)

    def config(self) -> dict[str, str]:
        return {"ClusterName": "alpha"}

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("values", "uid", "code", "message"),
    [
        ({}, 2001, 0, "left alone"),
        ({}, 0, 0, "left alone"),
        ({}, 2002, 1, "not yours"),
        ({"state": "PENDING"}, 2001, 1, "does not run"),
        ({"comment": "[keep until=2096-11-18T14:00:00Z why=before]"}, 2001, 1, "only one"),
        ({"comment": "[keep until=2016-11-18T14:00:00Z why=in another run]"}, 2001, 0, "left alone"),
    ],
)
def test_keep_is_granted_once_to_owner_and_root(  # noqa: PLR0917
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], uid: int, code: int, message: str
) -> None:
    """The job must be running."""
    slurm = Slurm(**{"uid": 2001, **values})
    monkeypatch.setattr(keep, "open_client", lambda backend, **_: slurm)
    monkeypatch.setattr("os.getuid", lambda: uid)
    result = run("keep", "7", "--for", "2h", "--why", "the debugger is attached", "--state", str(tmp_path))
    assert (status(result), message in result.output) == (code, True), output_of(result)
    assert bool(slurm.comments) is (code == 0)
    assert not (tmp_path / "affinode.sqlite").exists()


def test_keep_needs_no_database_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exemption is in the job's comment; it is not written to a database that cannot be opened."""
    slurm = Slurm(uid=0)
    monkeypatch.setattr(keep, "open_client", lambda backend, **_: slurm)
    monkeypatch.setattr(extras, "missing", lambda: ["sqlalchemy"])
    monkeypatch.setitem(sys.modules, "slurm_affinode.db.audit", None)
    result = run("keep", "7", "--for", "2h", "--why", "the debugger is attached", "--state", str(tmp_path), "--json")
    assert (status(result), json.loads(result.stdout)["written"]) == (0, False)
    assert slurm.comments


def test_keep_requires_a_reason_and_respects_the_maximum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "open_client", lambda backend, **_: Slurm(uid=0))
    for words in (("--for", "2h", "--why", "x"), ("--for", "9h", "--why", "the debugger is attached")):
        assert status(run("keep", "7", *words, "--state", str(tmp_path))) == 1


def test_list_is_recorded_in_the_audit_log(state: Path) -> None:
    """``history --limit`` prints the newest records and reports that older ones are omitted."""
    before = len(json.loads(run("zombies", "history", "--state", str(state), "--json").stdout))
    run("zombies", "list", "--state", str(state), "--slurm-backend", "commands")
    rows = json.loads(run("zombies", "history", "--state", str(state), "--json").stdout)
    assert len(rows) == before + 1
    assert rows[-1]["reason"].startswith("list: ")
    assert rows[-1]["evidence"][0]["finding"]
    run("zombies", "list", "--state", str(state), "--slurm-backend", "commands")
    last = run("zombies", "history", "--state", str(state), "--json", "--limit", "1")
    assert [row["number"] for row in json.loads(last.stdout)] == [rows[-1]["number"] + 1]
    assert "older records are omitted" in last.stderr
    whole = run("zombies", "history", "--state", str(state), "--json", "--limit", str(len(rows) + 1))
    assert (len(json.loads(whole.stdout)), whole.stderr) == (len(rows) + 1, "")


def test_audit_log_is_pruned_only_with_yes(state: Path) -> None:
    """Without ``--yes``, the number of records is shown; the deletion itself is recorded."""
    words = ("zombies", "history", "--state", str(state))
    run("zombies", "list", "--state", str(state), "--slurm-backend", "commands")
    count = len(json.loads(run(*words, "--json").stdout))
    shown = run(*words, "--prune", "now")
    assert f"{counted(count, 'record')} from before" in shown.stdout
    assert "would be deleted" in shown.stdout
    assert len(json.loads(run(*words, "--json").stdout)) == count
    assert json.loads(run(*words, "--prune", "now", "--yes", "--json").stdout)["records"] == count
    [left] = json.loads(run(*words, "--json").stdout)
    assert (left["verb"], left["reason"].endswith("zombies history --prune")) == ("prune", True)


def test_only_unfiltered_search_forgets_findings_that_are_gone() -> None:
    """First-seen times are forgotten only for kinds that were searched for on all nodes."""
    assessment = find.Assessment((), NOW, NOW, "live", snapshot=find.Snapshot("alpha", (), ()))

    def over(about: find.Assessment, acting: bool = True, **values: Any) -> list[str]:
        request = find.Request(**values)
        clean_up = CleanUpRequest(Config(), request, True, None, False, Policy(), False, False, acting)
        return Session(clean_up, about, None, None, None, NOW)._looked_at_all()  # type: ignore[arg-type]

    assert over(assessment) == ["alpha/orphan-process/", "alpha/orphan-memory/"]
    assert over(assessment, kinds=("orphan-memory",)) == ["alpha/orphan-memory/"]
    assert over(assessment, nodes=("c1",)) == over(assessment, users=("bob",)) == over(assessment, min_score=0.5) == []
    assert over(replace(assessment, snapshot=None)) == over(assessment, acting=False) == []


def test_ended_and_requeued_jobs_are_excluded() -> None:
    """Accounting may be older than Slurm's state: the job has ended, or another attempt has started."""
    submitted = NOW - timedelta(hours=9)
    jobs = [slurm_job(7, submit=submitted), slurm_job(8, submit=NOW), slurm_job(9, submit=submitted, state="COMPLETED")]
    findings = tuple(squatter(subject=job(job_id=n, id=str(n))) for n in (7, 8, 9, 10))
    other, ended = squatter(cluster="beta"), squatter(kind="time-limit", subject=job(end=NOW, state="TIMEOUT"))
    assessment = find.Assessment((*findings, other, ended), NOW, NOW, "history")
    clean_up = CleanUpRequest(Config(), find.Request(), False, None, False, Policy(), False, False)

    class Here:
        slurm = Slurm()

    def over(known: list[Any] | None) -> set[str]:
        return set(Session(clean_up, assessment, None, Here(), None, NOW, known)._ended_findings())  # type: ignore[arg-type]

    assert over(jobs) == {finding.key for finding in findings[1:]}
    assert over([]) == {finding.key for finding in findings}
    assert over(None) == set()
