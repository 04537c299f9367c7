"""The package as nodes and users have it: the wheel without extras in an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
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
            if " ".join(words) not in ANALYSIS and isinstance(command := group.get_command(context, name), click.Group):
                yield from walk(command, words)

    return walk(cli, ())


EACH = """
import json, os, sys, tempfile
import slurm_affinode.cli.main  # once, for all of them
from slurm_affinode.cli.entry import main

def child(words, out, err):
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.argv = ["slurm-affinode", *words.split()]
    main()

done = []
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            child(words, out, err)
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        done.append([status, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err))])
json.dump(done, sys.stdout)
"""
"""A program that runs each command in a process of its own, without a start of Python for each."""

Outcome = tuple[int, str, str]
"""Exit status, standard output and standard error."""


def each(programs: Path, commands: Sequence[str], cwd: Path) -> dict[str, Outcome]:
    """Run commands; return what each has done. None of them has a traceback."""
    done = call(programs / "python", "-c", EACH, cwd=cwd, stdin=json.dumps(commands))
    assert "Traceback" not in done.stderr, done.stderr
    outcomes = dict(zip(commands, map(tuple, json.loads(done.stdout)), strict=True))
    assert [words for words, (_, _, err) in outcomes.items() if "Traceback" in err] == []
    return outcomes


def affinode(programs: Path, words: str, cwd: Path) -> Outcome:
    """Run the installed program."""
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


def test_commands_run_or_name_the_extra(programs: Path, tmp_path: Path) -> None:
    """Exit status 2 and one line, with the command that installs the extra."""
    for command, (status, out, err) in each(programs, [f"{words} --help" for words in commands()], tmp_path).items():
        words = command.removesuffix(" --help")
        if words in ANALYSIS:
            assert (status, out, err.count("\n")) == (2, "", 1), words
            assert err.startswith(f"slurm-affinode: {words}: needs the extra analysis (")
            assert err.endswith(f"; {INSTALL}\n")
        else:
            assert (status, err) == (0, ""), words
            assert out.startswith("Usage: ")


def test_completion_of_a_missing_command_prints_nothing(programs: Path, tmp_path: Path) -> None:
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
    without_slurm = ("status", "status 5", "suspend 5", "wake 5", "images prune", "keep 5 --for 2h --why important")
    without_key = ("images list", "images verify", "agent")
    command_lines = [f"{words} --config {config}" for words in (*without_slurm, *without_key)]
    outcomes = list(each(programs, [*command_lines, "prolog", "epilog"], tmp_path).items())
    for words, (status, _, err) in outcomes[: len(without_slurm)]:
        assert status in (2, 3), (words, err)
        assert len(err.splitlines()) == 2, (words, err)
    for words, (status, _, err) in outcomes[len(without_slurm) : -2]:
        assert (status, f"{key}: " in err) == (2, True), (words, err)
    for words, (status, _, err) in outcomes[-2:]:
        message = f"slurm-affinode {words}: SLURM_JOB_ID and SLURM_JOB_UID are not set: it is for slurmd to call\n"
        assert (status, err) == (0, message)


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
        output = ""
        while "metrics at 127.0.0.1:" not in output:
            line = exporter.stderr.readline()
            assert line, output
            output += line
        port = output.rpartition("metrics at 127.0.0.1:")[2].partition("/")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"\nslurm_affinode_exporter_up" in answer.read()
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(30) == 0
    assert f"Parquet needs the extra analysis; {INSTALL}" in output
    assert [path.name for path in spool.iterdir()] == ["gpu-n1-20261118T120000.000Z.csv"]
