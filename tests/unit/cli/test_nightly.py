"""``nightly`` as cron runs it: a process, sacct on PATH, no output on success."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from slurm_affinode.pipeline.nightly import exclusive

HEADER = "JobIDRaw|Cluster|User|Account|Partition|State|Submit|Start|End|ElapsedRaw|NNodes|NodeList|AllocTRES|JobName"
JOB = (
    "7|c|ann|phys|gpu|COMPLETED|2026-11-19T09:00:00|2026-11-19T10:00:00|2026-11-19T12:00:00|7200|1|n1|gres/gpu=1|a b|c"
)
SACCT = """#!/bin/sh
echo "$*" >> {calls}
case "$*" in
  *--helpformat*) echo "JobID JobIDRaw Cluster User Account Partition State Submit Start End ElapsedRaw NNodes" \\
    "NodeList AllocTRES JobName"; exit 0;;
esac
[ -e {down} ] && {{ echo "sacct: error: Problem talking to the database: Connection refused" >&2; exit 1; }}
for arg in "$@"; do case $arg in --format=*) names=${{arg#--format=}};; esac; done
echo "$names" | tr , '\\037'
printf '%s\\n' "$names" | tr , '\\n' | while read name; do
  case $name in
    JobID|JobIDRaw) printf 7;; Cluster) printf c;; User) printf ann;; Account) printf phys;; Partition) printf gpu;;
    State) printf COMPLETED;; Submit) printf 2026-11-19T09:00:00;; Start) printf 2026-11-19T10:00:00;;
    End) printf 2026-11-19T12:00:00;; ElapsedRaw) printf 7200;; NNodes) printf 1;; NodeList) printf n1;;
    AllocTRES) printf gres/gpu=1;; JobName) printf 'a|b';;
  esac
  [ "$name" = "${{names##*,}}" ] && printf '\\n' || printf '\\037'
done
"""
GPU = "timestamp,node,uuid,util_pct,job\n" + "".join(
    f"2026-11-19T{10 + minute // 60}:{minute % 60:02d}:00Z,n1,GPU-1,0,7\n" for minute in range(120)
)


@pytest.fixture
def site(tmp_path):
    """Return a function that runs ``nightly`` at 04:15 on 20 November 2026."""
    programs = tmp_path / "bin"
    programs.mkdir()
    sacct = programs / "sacct"
    sacct.write_text(SACCT.format(calls=tmp_path / "calls", down=tmp_path / "down"))
    sacct.chmod(0o755)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "n1.csv").write_text(GPU)
    config = tmp_path / "config.toml"
    config.write_text(
        f'[store]\nstate_dir = "{tmp_path / "state"}"\n[cluster]\ntimezone = "UTC"\n'
        f'[nightly]\nout = "{tmp_path / "reports"}"\ngpu_paths = ["{tmp_path}/gpu/*.csv"]\n'
    )
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_AFFINODE_CONFIG": str(config)}
    env.pop("SLURM_AFFINODE_DB", None)
    env.pop("SLURM_AFFINODE_STATE", None)
    code = "from slurm_affinode.cli.main import main; main()"

    def nightly(*arguments):
        argv = [sys.executable, "-W", "error", "-c", code, "nightly", "--now", "2026-11-20T04:15Z", *arguments]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=240)

    return nightly


def test_successful_run_prints_nothing_and_writes_reports(site, tmp_path):
    """sacct is queried from the start of the earliest report."""
    done = site()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    total = json.loads((tmp_path / "reports/day/2026-11-19/summary.json").read_text())["total"]
    assert (total["gpu_hours_allocated"], total["gpu_hours_idle"]) == (2, 2)
    assert "day/2026-11-19/report.html" in (tmp_path / "reports/index.html").read_text()
    assert "--starttime=2026-10-01T00:00:00" in (tmp_path / "calls").read_text()


def test_next_run_overlaps_and_skips_unchanged_files(site, tmp_path):
    site()
    (tmp_path / "calls").unlink()
    done = site("--json")
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert (record["rendered"], record["current"], record["failures"]) == ([], ["day/2026-11-19"], [])
    assert "1 files unchanged" in record["taken_in"][-1]
    calls = (tmp_path / "calls").read_text()
    assert "--starttime=2026-11-18T04:15:00" in calls
    assert "--starttime=2026-11-19T04:15:00" in calls


def test_unreachable_accounting_database_does_not_stop_the_other_steps(site, tmp_path):
    site()
    (tmp_path / "down").touch()
    (tmp_path / "gpu" / "n2.csv").write_text("nothing of use\n")
    done = site()
    assert (done.returncode, done.stdout) == (3, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "slurm-affinode: nightly: 2 parts failed"
    assert lines[1].startswith("  accounting: sacct cannot reach the accounting database")
    assert any(line.startswith(f"  GPU metrics: {tmp_path}/gpu/n2.csv") for line in lines)
    assert "Traceback" not in done.stderr


def test_concurrent_run_is_rejected(site, tmp_path):
    with exclusive(tmp_path / "state" / "nightly.lock"):
        done = site()
    assert done.returncode == 3
    assert done.stderr.startswith(f"slurm-affinode: another nightly run is in progress (process {os.getpid()})")
    assert not (tmp_path / "reports").exists()


def test_accounting_files_replace_sacct(site, tmp_path):
    """A file is read once; a missing one is reported; sacct is not run."""
    (tmp_path / "acct").mkdir()
    (tmp_path / "acct" / "a.txt").write_text(f"{HEADER}\n{JOB}\n")
    with (tmp_path / "config.toml").open("a") as config:
        config.write(f'accounting_paths = ["{tmp_path}/acct/*.txt", "{tmp_path}/missing"]\n')
    first = site("--verbose")
    assert first.returncode == 2
    assert "a.txt: 1 job runs (1 new, 0 updated), 0 bad records" in first.stdout
    assert f"accounting: {tmp_path}/missing: no such file" in first.stderr
    assert "a.txt: unchanged" in site("--verbose").stdout
    assert not (tmp_path / "calls").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_run_by_root_keeps_ownership_of_state(site, tmp_path):
    """The next run is the user's again. Other files of root, and those linked into the state directory, stay root's."""
    state, secret = tmp_path / "state", tmp_path / "secret"
    (state / "history").mkdir(parents=True)
    os.chown(state, 64123, 64124)
    (state / "images").mkdir()
    secret.touch()
    os.link(secret, state / "history" / "linked")
    (state / "reports").symlink_to(tmp_path)
    assert site().returncode == 0
    made = {path.relative_to(state).as_posix(): path.lstat().st_uid for path in state.rglob("*")}
    roots = {name for name, uid in made.items() if uid == 0}
    assert roots == {"images", "history/linked", "reports"}
    assert {"nightly.lock", "affinode.sqlite", "history/manifest.json"} <= made.keys() - roots
    assert tmp_path.stat().st_uid == 0
