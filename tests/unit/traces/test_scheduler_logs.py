"""Job logs of Helios and Acme. The rows are synthetic, in the published formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import claims, job_figures, job_page, scheduler_logs

HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
KALOS = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,"
    "fail_time,stop_time,duration,queue,gpu_time\n"
)
DAY = "2020-06-09"


def helios(root: Path, rows: str, gpus: str = "") -> Path:
    directory = root / "Venus"
    directory.mkdir(exist_ok=True)
    (directory / "cluster_log.csv").write_text(HELIOS + rows)
    if gpus:
        (directory / "cluster_gpu_number.csv").write_text("date,vc1,total\n" + gpus)
    return directory


ROWS = (
    f"1,ua,vc1,1,1,1,COMPLETED,{DAY} 08:00:00,{DAY} 08:00:10,{DAY} 09:00:10,3600,10\n"
    f"2,ub,vc1,8,8,1,TIMEOUT,{DAY} 08:00:00,{DAY} 08:01:00,{DAY} 10:01:00,7200,60\n"
    f"3,ua,vc1,0,4,1,COMPLETED,{DAY} 08:00:00,{DAY} 08:00:00,{DAY} 08:30:00,1800,0\n"
    f"4,ub,vc1,4,4,1,CANCELLED,{DAY} 08:00:00,,{DAY} 08:10:00,0,600\n"
    f"5,uc,vc1,2,4,1,CANCELLED,{DAY} 08:00:00,{DAY} 08:00:00,{DAY} 08:00:00,0,0\n"
)


def test_jobs_of_helios_have_waits_states_and_capacity(tmp_path: Path) -> None:
    """Jobs without GPUs are counted; a job that never started is left out with its line."""
    directory = helios(tmp_path, ROWS, "2020-04-01,64,64\n2020-09-01,128,128\n")
    log = scheduler_logs.read_helios(directory)
    assert log.jobs.select("number", "units", "run_s", "wait_s").rows() == [
        (2, 1, 3600, 10),
        (3, 8, 7200, 60),
        (6, 2, 1, 0),
    ]
    assert (log.capacity, log.cluster, log.jobs_without_units, log.zone) == (128, "Venus", 1, None)
    assert [(part.reason.partition(":")[0], part.examples) for part in log.left_out] == [
        ("without a start", (f"{directory / 'cluster_log.csv'}:5",))
    ]
    s = job_figures.analyse(log)
    assert s.final_states is not None
    assert {name: (state.jobs, round(state.unit_hours, 3)) for name, state in s.final_states.items()} == {
        "canceled": (1, 0.001), "completed": (1, 1.0), "failed": (1, 16.0),
    }  # fmt: skip
    assert sum(state.hours_share for state in s.final_states.values()) == pytest.approx(1)
    assert s.recorded_runs_differ == 0
    assert s.arrivals is not None
    assert (s.arrivals.zone, s.arrivals.hour["08"]) == (None, 3)


def test_run_times_of_kalos_are_end_minus_start(tmp_path: Path) -> None:
    """Its column of durations begins with the submission: it is the other recipe of published run times."""
    file = tmp_path / "trace_kalos.csv"
    file.write_text(
        KALOS + "dlc1,uf,8,64,960,1000,100.0,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,"
        "2023-05-17 11:01:16+00:00,2023-05-17 11:01:16+00:00,,18,10.0,1152.0\n"
    )
    log = scheduler_logs.read_acme(file)
    s = job_figures.analyse(log)
    assert (s.run_s.mean, s.recorded_run_mean_s, s.recorded_runs_differ, s.cluster) == (8.0, 18.0, 1, "Kalos")
    assert any("end minus start for 1 job" in text for text in job_page.notes(s))
    judged = claims.judge(claims.load("acme"), claims.flat(s.as_dict()), log.cluster)
    assert {claim.id.partition("-")[0] for claim in judged} == {"kalos"}
    assert next(claim for claim in judged if claim.id == "kalos-mean-run").other_computed == 18.0


def test_offsets_of_acme_are_converted(tmp_path: Path) -> None:
    """Submissions are shown in the zone whose offset they have."""
    file = tmp_path / "trace_seren.csv"
    file.write_text(
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"
        "5778432,u5907,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,"
        "2023-03-01 00:20:51+08:00,117,32,936.0\n"
    )
    s = job_figures.analyse(scheduler_logs.read_acme(file))
    assert s.arrivals is not None
    assert (s.arrivals.zone, s.arrivals.hour["00"], str(s.since)) == ("Asia/Shanghai", 1, "2023-02-28 16:18:22+00:00")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (f"1,ua,vc1,1,1,1,COMPLETED,{DAY} 08:00:00,{DAY} 8,{DAY} 09:00:00,1,1\n", r"csv:2: start_time is not a time"),
        (f"1,ua,vc1,x,1,1,COMPLETED,{DAY} 08:00:00,,,1,1\n", r"csv:2: gpu_num is not a number: x"),
        (f"1,ua,vc1,1,1,1,,{DAY} 08:00:00,,,1,1\n", r"csv:2: has no state"),
        ("1,ua,vc1,1,1,1,FAILED,,,,1,1\n", r"csv:2: has no submit_time"),
        (f"1,ua,vc1,1,1,1,FAILED,{DAY} 08:0", r"csv:2: is cut off in its last line"),
    ],
)
def test_bad_line_is_an_error(tmp_path: Path, row: str, why: str) -> None:
    """These are published files: a line that does not fit is another format, or a truncated copy."""
    with pytest.raises(InputError, match=why):
        scheduler_logs.read_helios(helios(tmp_path, row))


def test_times_with_and_without_offset_are_an_error(tmp_path: Path) -> None:
    rows = f"1,ua,vc1,1,1,1,FAILED,{DAY} 08:00:00,,,1,1\n2,ua,vc1,1,1,1,FAILED,{DAY} 08:00:00+08:00,,,1,1\n"
    with pytest.raises(InputError, match=r"csv:2: has a time without an offset"):
        scheduler_logs.read_helios(helios(tmp_path, rows))


def test_directory_of_several_clusters_is_an_error(tmp_path: Path) -> None:
    """Each cluster is a log of its own."""
    helios(tmp_path, ROWS)
    (tmp_path / "Earth").mkdir()
    with pytest.raises(InputError, match="has the clusters Earth, Venus"):
        scheduler_logs.read_helios(tmp_path)
    with pytest.raises(InputError, match="is a directory"):
        scheduler_logs.read_acme(tmp_path)


@pytest.mark.parametrize(
    ("name", "clusters"), [("helios", scheduler_logs.HELIOS_CLUSTERS), ("acme", scheduler_logs.ACME_CLUSTERS)]
)
def test_published_figures_are_those_of_the_summaries(shared_data: Path, name: str, clusters: tuple[str, ...]) -> None:
    """Each claim is a figure of the published summary of its cluster."""
    file = {"helios": "helios/helios_cluster_summary.csv", "acme": "acme/cluster_summary.csv"}[name]
    head, *lines = [line.split(",") for line in (shared_data / file).read_text().split()]
    rows = {cells[0]: dict(zip(head, cells, strict=True)) for cells in lines}
    table = claims.load(name)["claim"]
    assert {entry["cluster"] for entry in table} == set(clusters)
    for entry in table:
        numbers = [float(cell) for key, cell in rows[entry["cluster"]].items() if key != "id" and cell]
        scaled = [value for number in numbers for value in (number, number / 3600, number * 100)]
        assert any(abs(value - entry["value"]) <= 0.5 * 10 ** -entry["decimals"] for value in scaled), entry["id"]
