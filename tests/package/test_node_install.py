"""The package as nodes and users have it: the wheel without extras in an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest

from slurm_affinode.base.extras import INSTALL, LIBRARIES
from slurm_affinode.cli.main import cli
from slurm_affinode.model.finding import JobAttempt
from slurm_affinode.model.job_summary import JobSummary

from .environments import call, install

pytestmark = pytest.mark.slow

LIMIT_MB = 80
ANALYSIS = {
    "demo", "ingest sacct", "ingest gpu", "ingest serving", "ingest allocations", "ingest suspensions", "report",
    "nightly", "export", "zombies list", "zombies explain", "zombies warn", "zombies clean", "zombies history",
    "zombies signatures", "serving", "trace", "db",
}  # fmt: skip
"""Commands of the report machine; a group stands for all of its commands."""


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the installed programs."""
    return install(wheel, tmp_path_factory.mktemp("node") / "env")


def commands() -> Iterator[str]:
    """Yield all commands and groups, apart from those in a group that needs the extra."""

    def walk(group: click.Group, path: tuple[str, ...]) -> Iterator[str]:
        context = click.Context(group)
        for name in group.list_commands(context):
            words = (*path, name)
            yield " ".join(words)
            if " ".join(words) not in ANALYSIS and isinstance(found := group.get_command(context, name), click.Group):
                yield from walk(found, words)

    return walk(cli, ())


def affinode(programs: Path, words: str, cwd: Path) -> tuple[int, str, str]:
    """Run a command; return its exit status, standard output and standard error. None of them has a traceback."""
    done = call(programs / "slurm-affinode", *words.split(), cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_environment_is_small(programs: Path) -> None:
    """It has none of the libraries of the extra, and stays below the limit with compiled modules."""
    call(programs / "python", "-m", "compileall", "-q", programs.parent, cwd=programs)
    used = call("du", "-sm", programs.parent, cwd=programs).stdout.split()
    assert int(used[0]) < LIMIT_MB
    for library in LIBRARIES:
        assert call(programs / "python", "-c", f"import {library}", cwd=programs).returncode == 1, library


@pytest.mark.parametrize("words", list(commands()))
def test_command_runs_or_names_the_extra(programs: Path, tmp_path: Path, words: str) -> None:
    """Exit status 2 and one line, with the command that installs the extra."""
    status, out, err = affinode(programs, f"{words} --help", tmp_path)
    if words in ANALYSIS:
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"slurm-affinode: {words}: needs the extra analysis (")
        assert err.endswith(f"; {INSTALL}\n")
    else:
        assert (status, err) == (0, "")
        assert out.startswith("Usage: ")


def test_completion_of_a_missing_command_is_silent(programs: Path, tmp_path: Path) -> None:
    """The shell shows what completion writes to standard error."""
    for words, completed in (("slurm-affinode report --si", "\n"), ("slurm-affinode images ver", "plain,verify\n")):
        env = {"_SLURM_AFFINODE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
        done = call(programs / "slurm-affinode", cwd=tmp_path, **env)
        assert (done.stderr, done.stdout) == ("", completed)


def test_doctor_lists_what_it_did_not_check(programs: Path, tmp_path: Path) -> None:
    status, out, _ = affinode(programs, "doctor --json", tmp_path)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert status in (0, 1, 3)  # the machine may have a Slurm
    assert {"configuration", "time zone", "Slurm", "services", "sockets of jobs", "images"} <= checks.keys()
    assert checks["configuration"]["status"] == "ok"
    skipped = checks["not checked"]
    assert (skipped["status"], INSTALL in skipped["hint"]) == ("skipped", True)
    assert "database, GPU metrics, sacct, reports" in skipped["detail"]


def test_commands_of_users_and_hooks_fail_with_one_reason(programs: Path, tmp_path: Path) -> None:
    """They need a Slurm, a key of images, or an agent; none of it is on this machine."""
    config = tmp_path / "config.toml"
    key, bin_dir = tmp_path / "image.key", tmp_path / "none"
    config.write_text(f'[slurm]\nbin_dir = "{bin_dir}"\n[suspend]\nkey_file = "{key}"\njournal = "{tmp_path}/j"\n')
    for words in ("status", "status 5", "suspend 5", "wake 5", "images prune", "keep 5 --for 2h --why important"):
        status, _, err = affinode(programs, f"{words} --config {config}", tmp_path)
        assert status in (2, 3), (words, err)
        assert len(err.splitlines()) == 2, (words, err)
    for words in ("images list", "images verify", "agent"):
        status, _, err = affinode(programs, f"{words} --config {config}", tmp_path)
        assert (status, f"{key}: " in err) == (2, True), (words, err)
    for words in ("prolog", "epilog"):
        assert affinode(programs, words, tmp_path)[::2] == (
            0, f"slurm-affinode {words}: SLURM_JOB_ID and SLURM_JOB_UID are not set: it is for slurmd to call\n",
        )  # fmt: skip


def test_job_is_shown_from_its_published_file(programs: Path, tmp_path: Path) -> None:
    """The owner of a job needs nothing else; without such files the extra is named."""
    status, _, err = affinode(programs, "job 7", tmp_path)
    assert (status, INSTALL in err) == (2, True)
    directory = tmp_path / "jobs"
    directory.mkdir(mode=0o711)
    start = datetime(2026, 11, 20, tzinfo=UTC)
    ref = JobAttempt(7, "7", start, start, start + timedelta(hours=2), "train", "COMPLETED", 7200.0)
    shown = JobSummary(
        job=ref, cluster="c", user="ann", uid=os.geteuid(), account="lab", partition="gpu", qos=None, nodes=("g1",),
        cpus=8, memory_gib=8.0, gpu_count=0, gpu_models=(), until=start, suspended_s=0.0, slot_s=0.0, uses=(), gpus=(),
        idle_windows=(), suspensions=(), findings=(), verdict="Well used.", advice=(), notes=(), source="published",
        generated=start,
    )  # fmt: skip
    (directory / f"{os.geteuid()}.jsonl").write_text(json.dumps(shown.as_json()) + "\n")
    config = tmp_path / "config.toml"
    config.write_text(f'[nightly.jobs]\ndirectory = "{directory}"\n')
    status, out, err = affinode(programs, f"job 7 --config {config}", tmp_path)
    assert (status, err) == (0, "")
    assert "Job 7 (train) of ann" in out
    assert "Well used." in out
    status, _, err = affinode(programs, f"job 8 --config {config}", tmp_path)
    assert (status, err.startswith("slurm-affinode: no summary of a job 8 of yours is published")) == (1, True)


def test_clean_up_policy_is_checked_without_replay(programs: Path, tmp_path: Path) -> None:
    status, out, err = affinode(programs, "zombies policy check", tmp_path)
    assert (status, "no mistakes" in out) == (0, True)
    assert err == f"the replay is not possible: it needs the extra analysis; {INSTALL}\n"


def test_exporter_serves_metrics_and_keeps_text_in_its_spool(programs: Path, tmp_path: Path) -> None:
    """A file that an earlier process left open is closed, and not converted to Parquet."""
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "gpu-n1-20261118T120000.000Z.csv.part").write_text("cluster,node\n,n1\n,n")
    argv = [programs / "slurm-affinode", "exporter", "--listen", "127.0.0.1:0", "--node", "n1", "--spool", spool]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as exporter:
        assert exporter.stderr is not None
        said = ""
        while "metrics at 127.0.0.1:" not in said:
            line = exporter.stderr.readline()
            assert line, said
            said += line
        port = said.rpartition("metrics at 127.0.0.1:")[2].partition("/")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"\nslurm_affinode_exporter_up" in answer.read()
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(30) == 0
    assert f"Parquet needs the extra analysis; {INSTALL}" in said
    assert [path.name for path in spool.iterdir()] == ["gpu-n1-20261118T120000.000Z.csv"]
