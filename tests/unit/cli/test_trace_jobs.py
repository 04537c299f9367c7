"""``slurm-affinode trace swf`` and the other traces of jobs: figures, files and errors."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurm_affinode.cli.main import cli

SWF = "; MaxProcs: 64\n" + "".join(f"{n} {60 * n} 5 60 2 -1 -1 2 120 -1 1 7 1 -1 -1 -1 -1 -1\n" for n in range(1, 4))
PHILLY = (
    "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,60,1,60,<b>x</b>\n2017-10-09 08:01:55,1,8,8,y\n"
)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, words)])


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def check_page(out: Path, *parts: str) -> dict[str, Any]:
    """Check that the page needs no network and has the parts; return the summary."""
    page = (out / "report.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert '<th scope="col" class="text"></th>' not in page  # a heading without text is none for a screen reader
    for part in parts:
        assert part in page, part
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def test_swf_writes_a_page_and_a_summary(tmp_path: Path) -> None:
    """Jobs that are left out are named with their lines; without a start, weekdays are unknown."""
    file = written(tmp_path / "log.swf", SWF + "4 0 0 -1 2 -1 -1 2 120 -1 1 7 1 -1 -1 -1 -1 -1\n")
    done = run("swf", file, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    summary = check_page(
        tmp_path / "out", "Recorded waits", "Requested and used time", "weekdays and hours are unknown",
        "The machine has 64 processors",
    )  # fmt: skip
    assert (summary["trace"], summary["jobs"], summary["arrivals"], summary["published"]) == ("swf", 3, None, [])
    assert summary["notes"] == [
        f"1 job without a run time, with 0 % of the processor-hours, left out: {file}:5",
    ]  # fmt: skip
    assert re.search(r"requested\.over_request +2\n", done.stdout)
    assert re.search(r"arrivals +unknown\n", done.stdout)
    assert "note: 1 job without a run time" in done.stderr


def test_philly_is_compared_with_published_figures(tmp_path: Path) -> None:
    file = tmp_path / "p.csv.gz"
    file.write_bytes(gzip.compress(PHILLY.encode()))
    done = run("philly", file, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    summary = check_page(
        tmp_path / "out", "How long jobs waited", "Published figures", "Not borne out", "GPU utilization"
    )
    verdicts = {claim["id"]: claim["verdict"] for claim in summary["published"]}
    assert (verdicts["jobs"], verdicts["mean-wait"]) == ("not-borne-out", "unknown")
    assert summary["size_classes"]["5-8"]["jobs"] == 1
    assert "Mean wait" in done.stdout


def test_philly_job_log_has_waits_by_size_and_final_states(tmp_path: Path) -> None:
    """A gang of 16 GPUs waited for 2 min, a job on one GPU for none. A synthetic log in the published format."""
    jobs = [
        {"status": status, "vc": "v", "jobid": f"application_{status}", "user": "<b>x</b>",
         "submitted_time": "2017-10-07 00:00:00",
         "attempts": [{"start_time": start, "end_time": "2017-10-07 00:04:00",
                       "detail": [{"ip": f"m{at}", "gpus": ["gpu0"] * gpus} for at in range(servers)]}]}
        for status, start, servers, gpus in (
            ("Failed", "2017-10-07 00:02:00", 2, 8), ("Pass", "2017-10-07 00:00:00", 1, 1),
        )
    ]  # fmt: skip
    written(tmp_path / "cluster_job_log", json.dumps(jobs))
    written(tmp_path / "cluster_machine_list", "machineId,number of GPUs, single GPU mem\nm0,8, 24GB\nm1,8, 24GB\n")
    done = run("philly", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    summary = check_page(tmp_path / "out", "Wait, mean", "Final states", "The machine has 16 GPUs", "Not borne out")
    waits = {label: size_class["wait_mean_s"] for label, size_class in summary["size_classes"].items()}
    assert waits == {"1": 0.0, "above-8": 120.0}
    assert summary["final_states"]["failed"]["unit_hours"] == pytest.approx(16 * 120 / 3600)
    assert {claim["id"]: claim["verdict"] for claim in summary["published"]}["completed"] == "not-borne-out"


def test_json_is_the_summary(tmp_path: Path) -> None:
    done = run("swf", written(tmp_path / "log.swf", SWF), "--json")
    assert json.loads(done.stdout)["unit_hours"] == pytest.approx(0.1)


DLRM = (
    "instance_sn,role,app_name,cpu_request,gpu_request,memory_request,creation_time,scheduled_time,deletion_time\n"
    "i0,HN,a,8,1,40.0,,,\ni1,CN,a,64,0,320.0,5.0,7.0,9.0\n"
)
PAI = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "p0,500,1024,1,250,,LS,Running,0,9,1\np1,1000,2048,4,1000,,BE,Pending,0,9,\n"
)


def test_dlrm2025_writes_a_page_and_a_summary(tmp_path: Path) -> None:
    file = written(tmp_path / "disaggregated_DLRM_trace.csv", DLRM)
    done = run("dlrm2025", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    summary = check_page(
        tmp_path / "out", "GPU nodes (HN)", "Known waits: 1. Instances created before the trace: 1;", "Not borne out",
        "The GPUs of the cluster: no share of a capacity is given",
    )  # fmt: skip
    assert summary["groups"]["HN"]["wait_s"] is None
    assert summary["total"]["wait_s"]["mean"] == 2
    assert json.loads(run("dlrm2025", file, "--json").stdout) == summary


def test_pai2023_writes_a_page_and_a_summary(tmp_path: Path) -> None:
    written(tmp_path / "openb_pod_list_default.csv", PAI)
    written(tmp_path / "openb_node_list_all_node.csv", "sn,cpu_milli,memory_mib,gpu,model\nn0,1,1,8,T4\n")
    done = run("pai2023", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    summary = check_page(tmp_path / "out", "Part of a GPU", "At least 0.25", "GPUs of the cluster")
    assert (summary["capacity"], summary["total"]["still_waiting"], summary["peak_gpus"]) == ({"T4": 8}, 1, 0.25)
    assert re.search(r"groups\.several-gpus\.wait_s +unknown\n", done.stdout)


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("dlrm2025", PAI, "no column role, app_name"),
        ("pai2023", DLRM, "no column pod_phase"),
        ("pai2023", PAI + "p2,5", "is cut off in its last line"),
        ("swf", "JobID,Start\n", "not in the Standard Workload Format"),
        ("swf", "; Version: 7\n" + SWF, "version 7"),
        ("swf", "1 1 5 -1 2 -1 -1 2 120 -1 1 7 1 -1 -1 -1 -1 -1\n", "no usable job: 1 job without a run time"),
        ("philly", "a,b\n1,2\n", "no column timestamp"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, command: str, text: str, message: str) -> None:
    done = run(command, written(tmp_path / "file", text), "--out", tmp_path / "out")
    assert done.exit_code != 0
    assert message in str(done.exception) + done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "text"), [("swf", SWF * 50), ("philly", PHILLY * 50), ("dlrm2025", DLRM), ("pai2023", PAI)]
)
def test_truncated_archive_is_an_error(tmp_path: Path, command: str, text: str) -> None:
    file = tmp_path / "file.gz"
    file.write_bytes(gzip.compress(text.encode())[:-12])
    done = run(command, file)
    assert done.exit_code != 0
    assert "is cut off or damaged" in str(done.exception) + done.output
