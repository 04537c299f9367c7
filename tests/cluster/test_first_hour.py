"""The first hour of an administrator: the commands of docs/for-administrators.md, in order, on a bare Debian 12.

The commands are taken from the blocks of the page. The machine has Slurm's commands with the accounting of three jobs,
and a Prometheus server with their GPU metrics, under the name that the page uses. All data is synthetic.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cluster.builds import PYTHON, REPOSITORY, image
from cluster.machines import Machine, container
from prometheus_server import backfill
from servers import program_of

PAGE = REPOSITORY / "docs" / "for-administrators.md"
HOUR = 3600
SLURM = Path(__file__).with_name("slurm_commands.py")
LOGIN = "alice"
"""A user without rights."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"Debian 12 has {PYTHON}, for which the packages are built"),
]


def blocks(number: int) -> list[list[str]]:
    """Return the commands of each shell block in the section with this number, without their comments."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[number]
    assert section.startswith(f"{number}. ")
    code_blocks = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [[line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()] for block in code_blocks]


@dataclass(frozen=True)
class Job:
    """A job of the site; times are hours before the present."""

    number: int
    user: str
    node: str
    gpu: int
    start_h: float
    end_h: float | None
    busy_h: float
    """For this long, it computes; then it only holds memory."""


JOBS = (
    Job(4101, "alice", "gpu01", 0, 49, 12, 1),
    Job(4102, "bob", "gpu01", 1, 49, 12, 37),
    Job(4103, "alice", "gpu02", 0, 20, None, 1),
)
SPAN_H = 50
"""Length of the history: yesterday is in it, in each time zone."""


def records(now: int) -> dict[str, object]:
    """Return the records of ``slurm_commands.py``."""

    def text(epoch: int | None) -> str:
        return "Unknown" if epoch is None else datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%S")

    accounting, jobs = [], []
    for job in JOBS:
        start, end = now - round(job.start_h * HOUR), None if job.end_h is None else now - round(job.end_h * HOUR)
        tres = "billing=8,cpu=8,mem=64G,node=1,gres/gpu=1"
        accounting.append({
            "Cluster": "alpha", "JobIDRaw": str(job.number), "JobID": str(job.number), "User": job.user,
            "Account": "lab", "Partition": "gpu", "QOS": "normal", "State": "RUNNING" if end is None else "COMPLETED",
            "ExitCode": "0:0", "Submit": text(start), "Eligible": text(start), "Start": text(start), "End": text(end),
            "ElapsedRaw": (end or now) - start, "TimelimitRaw": 3 * 24 * 60, "NNodes": 1, "NodeList": job.node,
            "NCPUS": 8, "ReqMem": "64G", "ReqTRES": tres, "AllocTRES": tres, "JobName": "train",
            "SubmitLine": "sbatch --gpus=1 train.sh", "StartEpoch": start, "EndEpoch": end,
        })  # fmt: skip
        if end is None:
            jobs.append({
                "job_id": job.number, "name": "train", "user_name": job.user, "user_id": 2001, "account": "lab",
                "partition": "gpu", "qos": "normal", "job_state": ["RUNNING"], "submit_time": start,
                "eligible_time": start, "start_time": start, "end_time": start + 3 * 24 * HOUR,
                "time_limit": 3 * 24 * 60, "nodes": job.node, "batch_host": job.node, "node_count": 1, "cpus": 8,
                "tres_req_str": tres, "tres_alloc_str": tres, "batch_flag": True,
                "gres_detail": [f"gpu:1(IDX:{job.gpu})"],
                "squeue": {
                    "JobID": job.number, "UserName": job.user, "UserID": 2001, "Account": "lab", "Partition": "gpu",
                    "QOS": "normal", "State": "RUNNING", "SubmitTime": start, "EligibleTime": start,
                    "StartTime": start, "TimeLimit": "3-00:00:00", "NodeList": job.node, "BatchHost": job.node,
                    "NumNodes": 1, "NumCPUs": 8, "tres-alloc": tres, "BatchFlag": 1, "Name": "train",
                },
            })  # fmt: skip
    nodes = [{"name": f"gpu0{n}", "state": ["MIXED"], "gres": "gpu:2", "tres": "cpu=32,mem=256G,gres/gpu=2"}
             for n in (1, 2)]  # fmt: skip
    return {"accounting": accounting, "jobs": jobs, "nodes": nodes}


def metrics(now: int) -> str:
    """Return the metrics of the GPUs of two nodes as OpenMetrics, a sample a minute up to the present."""
    values: dict[str, list[str]] = {name: [] for name in ("GPU_UTIL", "FB_USED", "FB_FREE", "POWER_USAGE")}
    for node, gpu in ((node, gpu) for node in ("gpu01", "gpu02") for gpu in (0, 1)):
        for at in range(now - SPAN_H * HOUR, now, 60):
            ago_h = (now - at) / HOUR
            job = next(
                (job for job in JOBS if (job.node, job.gpu) == (node, gpu) and job.start_h >= ago_h > (job.end_h or 0)),
                None,
            )
            busy = job is not None and job.start_h - ago_h < job.busy_h
            labels = f'Hostname="{node}",gpu="{gpu}",UUID="GPU-{node}-{gpu}",modelName="NVIDIA A100-SXM4-80GB"'
            labels += ',cluster="alpha"' + (f',hpc_job="{job.number}"' if job else "")
            used = 40_000 if job else 0
            for name, value in zip(values, (95 * busy, used, 81_920 - used, 60 + 300 * busy), strict=True):
                values[name].append(f"DCGM_FI_DEV_{name}{{{labels}}} {value} {at}")
    lines = [line for name, rows in values.items() for line in (f"# TYPE DCGM_FI_DEV_{name} gauge", *rows)]
    return "\n".join([*lines, "# EOF\n"])


SITE = f"""
install -m 0755 -D /site/records.json /etc/slurm/records.json
for name in sacct scontrol squeue sacctmgr scancel; do
  {{ echo '#!/usr/bin/python3.11'; cat /site/slurm_commands.py; }} >/usr/bin/$name; chmod 0755 /usr/bin/$name
done
useradd --create-home --uid 2001 {LOGIN}
cp -r /site/data /srv/prometheus
"""
PROMETHEUS = "/programs/prometheus --config.file=/site/prometheus.yml --storage.tsdb.path=/srv/prometheus"
READY = "timeout 60 sh -c 'until grep -q \"Server is ready\" /srv/prometheus.log; do sleep 0.1; done'"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The directory with the records, programs and metrics of the site."""
    now = int(time.time()) // 60 * 60
    (tmp_path / "records.json").write_text(json.dumps(records(now)))
    (tmp_path / "metrics.om").write_text(metrics(now))
    (tmp_path / "prometheus.yml").write_text("global: {scrape_interval: 1h}\n")
    (tmp_path / "data").mkdir()
    backfill(program_of("promtool"), tmp_path / "metrics.om", tmp_path / "data")
    shutil.copy(SLURM, tmp_path)
    return tmp_path


@contextmanager
def bare(site: Path, packages: str, *options: str, volumes: dict[Path, str]) -> Iterator[Machine]:
    """Start a bare Debian 12 with ``packages`` of Debian, and the Slurm and the Prometheus of the site."""
    programs = Path(program_of("prometheus")).resolve().parent
    hosts = ["--init", "--add-host=prometheus.example.org:127.0.0.1", *options]
    with container(
        "affinode-first-hour", image("bookworm"), "sleep", "infinity",
        volumes={site: "/site", programs: "/programs", **volumes}, options=hosts,
    ) as machine:  # fmt: skip
        machine.run("echo 'APT::Get::Assume-Yes \"true\";' >/etc/apt/apt.conf.d/yes")
        machine.run(f"apt-get update -qq && apt-get install -qq --no-install-recommends {packages}")
        machine.run(SITE)
        machine.run(f"nohup {PROMETHEUS} >/srv/prometheus.log 2>&1 & {READY}")
        yield machine


def follow(machine: Machine, install: list[str], directory: str) -> None:
    """Run the commands of the page, the installation by ``install``, and check what they lead to."""
    *_, setup, report = blocks(1)
    *installs, doctor = install
    for command in installs:
        machine.run(command, directory=directory)
    assert "slurm-affinode setup report" in machine.run(doctor, 1), "the database is missing, and how to create it"

    show, create = setup
    assert "would create" in machine.run(show)
    machine.run("test ! -e /var/lib/slurm-affinode/reports && test ! -e /etc/cron.d/slurm-affinode")
    machine.run(create)
    machine.run(doctor)  # status 0: there are no problems
    assert "would" not in machine.run(show)
    check_reports(machine)
    [command] = report
    machine.run(command, directory="/srv")
    assert "4101" in machine.run("cat /srv/report/report.html")
    check_jobs(machine)


def check_reports(machine: Machine) -> None:
    """The reports exist, nothing belongs to root, and the user of the nightly run can make them again."""
    state = "/var/lib/slurm-affinode"
    listed = json.loads(machine.run(f"cat {state}/reports/index.json"))["reports"]
    assert {report["kind"] for report in listed} >= {"day"}
    for report in listed:
        machine.run(f"test -s {state}/reports/{report['href']} && grep -q {report['href']} {state}/reports/index.html")
    summary = json.loads(machine.run(f"cat {state}/reports/{listed[0]['href'].replace('report.html', 'summary.json')}"))
    assert summary["total"]["gpu_hours_idle"] > 0
    assert machine.run(f"find {state} ! -user slurm-affinode") == ""
    machine.run("grep -q '^17 4 .* slurm-affinode .*nightly' /etc/cron.d/slurm-affinode")
    machine.run("runuser -u slurm-affinode -- slurm-affinode nightly --force")
    assert machine.run(f"find {state} ! -user slurm-affinode") == ""


def check_jobs(machine: Machine) -> None:
    """The commands that only look, and what an owner without access to the database is shown."""
    stored, live, explain, policy = blocks(3)[0]
    output = machine.run(stored, 1)
    assert all(job in output for job in ("4101", "4103"))
    assert "4102" not in output
    assert "gpu02 is unknown" in machine.run(live, 1), "no agent: the node is unknown, and not idle"
    assert "19.0 GPU-hours" in machine.run(explain.replace("JOBID", "4103"))
    assert "no mistakes" in machine.run(policy)
    assert "36 of 37 GPU-hours were idle" in machine.run("slurm-affinode job 4101")

    running = machine.run(explain.replace("JOBID", "4103"), user=LOGIN)
    assert "Job 4103 (train) of alice: RUNNING" in running
    ended = machine.run(explain.replace("JOBID", "4101"), 2, user=LOGIN)
    assert "Slurm knows no job 4101" in ended
    assert "nightly.jobs.directory" in ended


@pytest.mark.nightly
@pytest.mark.timeout(1200, func_only=True)
def test_first_hour_with_packages(packages: Path, site: Path) -> None:
    with bare(site, "cron", volumes={packages: "/packages"}) as machine:
        follow(machine, blocks(1)[0], "/packages")


@pytest.mark.nightly
@pytest.mark.timeout(1200, func_only=True)
def test_first_hour_in_a_checkout(docker: None, site: Path, tmp_path: Path) -> None:
    """pip builds the package, with the compiler of the package ziglang, and downloads the libraries."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    pack = ["tar", "--null", "--files-from=-", "--directory", REPOSITORY, "-c"]
    archive = subprocess.run([*pack], input=listed, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", checkout], input=archive, check=True)
    settings = {name: value for name, value in os.environ.items() if name in ("PIP_CERT", "PIP_INDEX_URL")}
    volumes = {checkout: "/checkout"}
    if "PIP_CERT" in settings:  # the index is reached through a proxy with a CA of its own
        volumes[Path(settings["PIP_CERT"]).resolve().parent] = "/certificates"
        settings["PIP_CERT"] = f"/certificates/{Path(settings['PIP_CERT']).resolve().name}"
    options = [f"--env={name}={value}" for name, value in settings.items()]
    with bare(site, "python3-venv", *options, volumes=volumes) as machine:
        machine.run("cp -r /checkout /root/slurm-affinode")
        follow(machine, blocks(1)[1], "/root/slurm-affinode")
