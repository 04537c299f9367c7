"""The commands status, suspend, wake, agent, prolog and epilog."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.base.errors import ConfigError
from slurm_affinode.cli import entry
from slurm_affinode.cli.main import cli

SIGNAL = {"of": "GPU 0", "name": "utilization", "value": 37.5, "limit": 0.0, "verdict": "busy"}
IDLE = {
    "verdict": "busy", "why": "GPU 0: utilization 37 is above 0", "window_s": 900, "progress_s": 660.0,
    "remaining_s": 240.0, "since": 1.7e9, "sampled": 1.7e9, "broken_by": "GPU 0: utilization 44 is above 0",
    "signals": [SIGNAL, SIGNAL | {"name": "dram", "value": None, "verdict": "unknown"}],
}  # fmt: skip
RUNNING: dict[str, Any] = {
    "job_id": 7, "shown_id": "7", "user": "al\x1b[2Jice", "uid": 2001, "node": "c1", "state": "watched",
    "option": {"window_s": 900, "util_pct": 0.0, "mode": "requeue", "wake": "auto", "when": "pressure",
               "signal": "USR1@10"},
    "gpus": [{"name": "GPU 0", "uuid": "GPU-abc"}], "memory_held_bytes": 52 << 30, "suspensions": 2, "idle": IDLE,
    "next": {"act": False, "code": "busy", "text": "busy; then nothing", "for_jobs": [],
             "against": [{"code": "no-pressure", "text": "no pending job could use its GPUs"}]},
    "last": {"at": 1.7e9, "done": False, "text": "not suspended, it runs on: the lock timed out"},
}  # fmt: skip
SUSPENDED: dict[str, Any] = {
    "job_id": 8, "shown_id": "8", "user": "alice", "uid": 2001, "node": "c1", "state": "suspended", "since": 1.7e9,
    "suspended_s": 720.0, "suspensions": 2, "gpus_released": 1, "memory_held_bytes": 0, "gpu_bytes": 52 << 30,
    "image_bytes": 53 << 30, "where": "node", "wake": "hold", "why": "idle 15m", "failure": "the image is damaged",
}  # fmt: skip


class Reach:
    """Agents with given responses."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.nodes: dict[str, dict[str, Any] | str] = {}

    def about(self, job: str, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((job, request))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def everywhere(self, nodes: tuple[str, ...], uid: int, *, user: str) -> Iterator[tuple[str, Any]]:
        yield from self.nodes.items()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    config = tmp_path / "config.toml"
    config.write_text("")

    def call(reach: Reach, *arguments: str) -> Result:
        @contextlib.contextmanager
        def reach_of(config: object) -> Iterator[Reach]:
            yield reach

        monkeypatch.setattr("slurm_affinode.cli.status.reach_of", reach_of)
        monkeypatch.setattr("slurm_affinode.cli.suspend.reach_of", reach_of)
        return CliRunner().invoke(cli, [*arguments, "--config", str(config)], standalone_mode=False)

    return call


def test_status_of_running_job(run: Any) -> None:
    """It shows option, GPUs, memory, idle window, next action and each signal, without control characters."""
    done = run(Reach({"dry_run": True, "jobs": [RUNNING]}), "status", "7")
    for text in (
        "on c1: watched", "window 15m, util 0 %, requeue, wake auto, when pressure, signal USR1@10", "GPU 0 (GPU-abc)",
        "52 GiB", "11m of 15m idle", "utilization 44 is above 0", "no-pressure: no pending job", "2 times so far",
        "the lock timed out", "37.5", "unknown", "dry run",
    ):  # fmt: skip
        assert text in done.output, text
    assert "\x1b" not in done.output


def test_status_names_rows_of_compatibility_and_remedies(run: Any) -> None:
    """For each mode, with all its refusals."""
    against = [
        {"code": "io-uring", "text": "python (8) uses io_uring", "remedy": "submit it without io_uring=allow"},
        {"code": "gone", "text": "its processes have ended", "remedy": None},
    ]
    modes = {"requeue": {"possible": False, "against": against}, "inplace": {"possible": True, "against": []}}
    row = RUNNING | {"compatibility": {"kinds": ["batch script", "job array"], "modes": modes}}
    done = run(Reach({"node": "c1", "jobs": [row]}), "status", "7")
    lines = [
        "  started as   batch script; job array",
        "  requeue      io-uring: python (8) uses io_uring",
        "               remedy: submit it without io_uring=allow",
        "               gone: its processes have ended",
        "  inplace      can be suspended",
    ]
    assert "\n".join(lines) in done.output


def test_status_of_refused_job_as_json(run: Any) -> None:
    """With code and remedy; the error is reported as well."""
    error = AnswerError("interactive", "job 7 cannot be suspended", hint="submit it with sbatch", exit_code=1)
    done = run(Reach(error), "status", "7", "--json")
    refusal = {"code": "interactive", "text": "job 7 cannot be suspended", "remedy": "submit it with sbatch"}
    assert json.loads(done.output) == {"jobs": [], "refusal": refusal}
    assert done.exception is error
    assert run(Reach(error), "status", "7").output == ""


def test_status_of_job_just_registered(run: Any) -> None:
    """Nothing has been sampled yet."""
    row = RUNNING | {
        "idle": None,
        "next": None,
        "last": None,
        "gpus": None,
        "memory_held_bytes": None,
        "suspensions": 0,
    }
    assert "not known yet" in run(Reach({"jobs": [row]}), "status", "7").output


def test_status_of_job_held_by_administrator(run: Any) -> None:
    """Neither the status nor the list proposes ``wake`` to the owner: it would be refused."""
    reach = Reach({"jobs": [{**SUSPENDED, "held_by_admin": True}]})
    reach.nodes = {"c1": {"node": "c1", "jobs": [{**SUSPENDED, "failure": None, "held_by_admin": True}]}}
    for output in (run(reach, "status", "8").output, run(reach, "status").output):
        assert "not before an administrator, who holds it, wakes or releases it" in output
        assert "slurm-affinode wake" not in output
    assert (
        "slurm-affinode wake 8" in run(Reach({"jobs": [{**SUSPENDED, "held_by_admin": False}]}), "status", "8").output
    )


@pytest.mark.parametrize(
    ("wake", "reason", "text"),
    [
        ("hold", "JobArrayTaskLimit", "as soon as Slurm has room for it: it is released, and pending for JobArrayTask"),
        ("now", "BeginTime", "as soon as Slurm has GPUs for it: it is released"),
        ("2h", "BeginTime", "(2h)"),
    ],
)
def test_status_of_released_job(run: Any, wake: str, reason: str, text: str) -> None:
    """Once released, also by ``scontrol release``, the wake setting of the option no longer applies."""
    row = {**SUSPENDED, "where": "shared", "wake": wake, "released": True, "reason": reason}
    output = run(Reach({"jobs": [row]}), "status", "8").output
    assert text in output
    assert "slurm-affinode wake" not in output


def test_status_of_job_being_restored(run: Any) -> None:
    """It shows neither a wait condition nor a ``wake`` command."""
    output = run(Reach({"jobs": [{**SUSPENDED, "restoring_on": "c2", "held_by_admin": False}]}), "status", "8").output
    assert "now: it is being restored on c2" in output
    assert "slurm-affinode wake" not in output


def test_status_of_suspended_job(run: Any) -> None:
    """It shows since when and why, where the job can be restored, how it wakes, and the last failure."""
    done = run(Reach({"jobs": [SUSPENDED]}), "status", "8")
    for text in ("suspended", "12m ago", "idle 15m", "only c1 can restore it", "slurm-affinode wake 8", "is damaged"):
        assert text in done.output, text


@pytest.mark.parametrize(
    ("wake", "text"),
    [
        ("hold", "on request"),
        ("auto", "when GPUs are free and no job waits"),
        ("now", "as soon as Slurm has GPUs for it: it is released"),
        ("2h", "at 2023-11-15 00:13:20 (2h)"),
        ("now+30days", "at 2023-12-14 22:13:20 (now+30days)"),
        ("2030-12-31T18:30", "at 2030-12-31 18:30:00 (2030-12-31T18:30)"),
    ],
)
def test_status_shows_when_job_wakes(run: Any, wake: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Durations count from the suspension and are shown as a time."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    done = run(Reach({"jobs": [SUSPENDED | {"wake": wake, "where": "shared"}]}), "status", "8")
    assert f"{text}; or: slurm-affinode wake 8" in done.output


def test_job_woken_before_its_image_is_copied_is_not_reported_as_released(run: Any) -> None:
    """Neither by ``wake`` nor by ``status``."""
    output = run(Reach({"released": False}), "wake", "8").output
    assert "will be released when it is in the queue and its image in the shared store" in output
    done = run(Reach({"jobs": [SUSPENDED | {"wake": "now", "where": "node"}]}), "status", "8")
    assert "as soon as the copy of its image to the shared store is complete; or" in done.output


def test_status_as_json(run: Any) -> None:
    """The response of the agent, unchanged."""
    assert json.loads(run(Reach({"jobs": [SUSPENDED]}), "status", "8", "--json").output)["jobs"] == [SUSPENDED]


def test_job_list_of_all_nodes(run: Any) -> None:
    """Each job is listed once, from the node with the best information; errors go to standard error."""
    reach = Reach()
    asleep = SUSPENDED | {"job_id": 7, "shown_id": "7"}
    reach.nodes = {"c1": {"jobs": [asleep, SUSPENDED]}, "c2": {"jobs": [RUNNING]}, "c3": "does not respond"}
    done = run(reach, "status")
    assert done.return_value == 0
    assert done.stdout.count("watched") == 1
    assert "asleep 12m" in done.stdout
    assert "c3: does not respond" in done.stderr
    listed = json.loads(run(reach, "status", "--json").stdout)
    assert [row["state"] for row in listed["jobs"]] == ["watched", "suspended"]
    reach.nodes = {"c3": "does not respond"}
    assert run(reach, "status").return_value == 3
    reach.nodes = {"c1": {"jobs": []}}
    assert "No job of yours" in run(reach, "status").stdout


def test_status_lists_tiers_that_were_passed_over(run: Any) -> None:
    """The reason is shown."""
    row = SUSPENDED | {"passed_over": "memory: /dev/shm/images: 0 B free, 53.0 GiB needed"}
    text = run(Reach({"jobs": [row]}), "status", "8").stdout
    assert "tiers that did not take the image: memory: /dev/shm/images: 0 B free, 53.0 GiB needed" in text


def test_status_shows_failed_restores_and_next_try(run: Any) -> None:
    """The failure, its count, the time of the next try, and the number of tries left."""
    row = SUSPENDED | {
        "failure": "Unable to detach", "failures": 2, "failed": 1790000000.0, "retry": 1790000120.0, "retries_left": 7,
    }  # fmt: skip
    text = run(Reach({"jobs": [row]}), "status", "8").stdout
    assert re.search(
        r"failure +Unable to detach\n +2 failed restores, last at .*; next try after .* \(7 retries left\)", text
    )
    assert re.search(r"wake +after .*, when its restore is retried", text)
    text = run(Reach({"jobs": [row | {"retries_left": 1}]}), "status", "8").stdout
    assert "(the last retry)" in text
    text = run(Reach({"jobs": [row | {"retry": None, "retries_left": 0}]}), "status", "8").stdout
    assert "not retried automatically" in text
    assert "next try" not in text


def test_status_shows_releases_without_a_restore(run: Any) -> None:
    """Slurm started the job where the agent found neither image nor note."""
    row = SUSPENDED | {"failure": None, "releases": 3, "release": 1790000120.0, "released": False}
    text = run(Reach({"jobs": [row]}), "status", "8").stdout
    assert re.search(r"released +3 times, and held again without a restore; next after ", text)
    assert "held again" not in run(Reach({"jobs": [row | {"released": True}]}), "status", "8").stdout


def test_suspend_waits_for_completion(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It polls until the job is suspended, even if the job is missing from the list for a moment."""
    monkeypatch.setattr("slurm_affinode.cli.suspend.POLL_S", 0.001)
    gone = AnswerError("unknown-job", "no such job", hint=None, exit_code=1)
    working = {"jobs": [RUNNING | {"state": "suspending", "last": None}]}
    reach = Reach({"begun": True}, working, gone, {"jobs": [SUSPENDED]})
    done = run(reach, "suspend", "8")
    assert done.return_value == 0
    assert "Job 8 is suspended; wake it with: slurm-affinode wake 8" in done.output
    assert [request["verb"] for _, request in reach.requests] == ["suspend", "status", "status", "status"]


def test_suspend_returns_if_job_was_woken_at_once(run: Any) -> None:
    """A server with a pending connection may sleep and wake between two polls."""
    last = {"at": time.time() + 3600, "done": True, "text": "awake after 0s in place: a connection waits on port 8000"}
    row = RUNNING | {"option": RUNNING["option"] | {"mode": "inplace"}, "last": last}
    done = run(Reach({"begun": True}, {"jobs": [row]}), "suspend", "7", "--timeout", "60s")
    assert done.output.splitlines()[-1] == f"Job 7 slept in place, and runs again: {last['text']}"


@pytest.mark.parametrize(("on_request", "wakes"), [(True, "it wakes on a request, or with"), (False, "wake it with")])
def test_suspend_in_place_reports_wake_conditions(run: Any, on_request: bool, wakes: str) -> None:
    """Waking on request is mentioned only if the job can receive requests."""
    row = RUNNING | {"state": "asleep", "in_place": {"wakes_on_request": on_request}}
    done = run(Reach({"begun": True}, {"jobs": [row]}), "suspend", "7")
    assert done.output.splitlines()[-1] == f"Job 7 sleeps in place; {wakes}: slurm-affinode wake 7"


def test_failed_suspend_reports_reason(run: Any) -> None:
    last = {"at": time.time(), "done": False, "text": "not suspended, it runs on: the lock timed out"}
    done = run(Reach({"begun": True}, {"jobs": [RUNNING | {"last": last}]}), "suspend", "7")
    assert isinstance(done.exception, AnswerError)
    assert "job 7: not suspended, it runs on: the lock timed out" in str(done.exception)
    assert done.exception.exit_code == 1


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_suspend_uses_the_clock_of_the_agent(run: Any, monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """The clock of the login node may be ahead or behind; an older failure must not be reported."""
    monkeypatch.setattr("slurm_affinode.cli.suspend.POLL_S", 0.001)
    agent_now = time.time() + ahead_s
    before = {"jobs": [RUNNING | {"last": {"at": agent_now - 2, "done": False, "text": "an older failure"}}]}
    now = {"jobs": [RUNNING | {"last": {"at": agent_now + 2, "done": False, "text": "the lock timed out"}}]}
    done = run(Reach({"begun": True, "at": agent_now}, before, now), "suspend", "7", "--timeout", "60s")
    assert "job 7: the lock timed out" in str(done.exception)


def test_suspend_wait_times_out(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says that the suspension continues."""
    monkeypatch.setattr("slurm_affinode.cli.suspend.POLL_S", 0.001)
    done = run(
        Reach({"begun": True}, {"jobs": [RUNNING | {"state": "suspending"}]}), "suspend", "7", "--timeout", "0.05s"
    )
    assert "the suspension continues" in str(done.exception)


def test_empty_node_name_is_a_usage_error(run: Any) -> None:
    """An unset variable must not select the local node."""
    assert isinstance(run(Reach({"jobs": []}), "status", "--node", "").exception, click.UsageError)


def test_suspend_without_waiting_and_wake(run: Any) -> None:
    """Each sends one request."""
    assert "is being suspended" in run(Reach({"begun": True}), "suspend", "7", "--no-wait").output
    assert "is released" in run(Reach({"released": True}), "wake", "8").output
    assert json.loads(run(Reach({"released": True}), "wake", "8", "--json").output) == {"released": True}


def test_world_writable_configuration_is_reported(tmp_path: Path) -> None:
    """The agent runs programs named in it as root."""
    config = tmp_path / "config.toml"
    config.write_text('[agent]\nrun_dir = "/nowhere"\n')
    config.chmod(0o666)
    done = CliRunner().invoke(cli, ["status", "--node", "c1", "--config", str(config)], standalone_mode=False)
    assert f"slurm-affinode: {config}: everybody may write to it: chmod o-w {config}" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="for root alone")
@pytest.mark.parametrize("which", ["config", "policy"])
def test_agent_rejects_configuration_writable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """A user who can write or replace it chooses the program that root runs as criu or to send mail."""
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr("slurm_affinode.agent.daemon.serve", lambda *words: started.append(words))
    monkeypatch.setattr("slurm_affinode.agent.systemd.log_to_stderr", lambda **words: None)
    config, policy = tmp_path / "config" / "config.toml", tmp_path / "policy" / "zombies.toml"
    for file in (config, policy):
        file.parent.mkdir()
        file.write_text("")
    config.write_text(f'[zombies]\npolicy = "{policy}"\n')

    def error() -> BaseException | None:
        return CliRunner().invoke(cli, ["agent", "--config", str(config)], standalone_mode=False).exception

    assert error() is None
    assert len(started) == 1
    read = started[0][1].read_config  # also when it is reloaded
    assert read() == started[0][0]
    file = config if which == "config" else policy
    for change, back in (
        (lambda: os.chown(file, 4242, -1), lambda: os.chown(file, 0, -1)),
        (lambda: file.chmod(0o664), lambda: file.chmod(0o644)),
        (lambda: os.chown(file.parent, 4242, -1), lambda: os.chown(file.parent, 0, -1)),
        (lambda: file.parent.chmod(0o777), lambda: file.parent.chmod(0o755)),
    ):
        change()
        result = error()
        assert isinstance(result, ConfigError)
        assert "users other than root may write to" in str(result)
        with pytest.raises(ConfigError, match="users other than root may write to"):
            read()
        back()
    assert len(started) == 1


def test_help_of_node_commands() -> None:
    for command, text in (("agent", "--dry-run"), ("prolog", "Prolog="), ("epilog", "requeued"), ("wake", "released")):
        assert text in CliRunner().invoke(cli, [command, "--help"]).output


@pytest.mark.parametrize("period", ["0s", "99999999999999d"])
def test_agent_rejects_period_out_of_range(period: str, tmp_path: Path) -> None:
    """Nothing is started."""
    (tmp_path / "config.toml").write_text(f'[agent]\nrun_dir = "{tmp_path}/run"\n')
    done = CliRunner().invoke(cli, ["agent", "--config", str(tmp_path / "config.toml"), "--period", period])
    assert done.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("which", ["prolog", "epilog"])
def test_hooks_bypass_the_command_line(
    which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``prolog`` and ``epilog`` do not load the modules of the command line; other commands do."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("sys.argv", ["slurm-affinode", which])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0
    assert "SLURM_JOB_ID" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["slurm-affinode", "--version"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0
