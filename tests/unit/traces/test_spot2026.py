"""The spot GPU trace of 2026: its list of nodes, and synthetic jobs in the published format."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import claims, spot2026, spot_page

NODES = "gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,128,0\nA10,1,128,1\nH800,8,192,2\n"
JOBS = "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type\n"
HOUR = 3600


def trace(root: Path, jobs: str | None, nodes: str = NODES) -> Path:
    (root / spot2026.NODES).write_text(nodes)
    if jobs is not None:
        (root / spot2026.JOBS_FILE).write_text(JOBS + jobs)
    return root


def test_demand_is_gpus_of_all_workers_from_submission_on(tmp_path: Path) -> None:
    """By hand: four A10 of two for half of ten hours, and a last job at the end of the window."""
    jobs = f"1,13,A10,8,1,4,0,{5 * HOUR},HP\n2,13,H800,8,8,1,0,{20 * HOUR},Spot\n3,57,A10,8,1,1,{10 * HOUR},60,Spot\n"
    result = spot2026.analyse(spot2026.read(trace(tmp_path, jobs)))
    s = result.summary
    a10, h800 = s.models["A10"], s.models["H800"]
    assert list(s.models) == ["H800", "A10"]
    assert (a10.nodes, a10.gpus, a10.demand_mean_gpus, a10.demand_peak_gpus) == (2, 2, 2.0, 4.0)
    assert (a10.demand_share, a10.high_priority_share, a10.above_capacity_time_share) == (1.0, 1.0, 0.5)
    assert (h800.demand_share, h800.high_priority_share, h800.above_capacity_time_share) == (1.0, 0.0, 0.0)
    assert (s.jobs, s.spot_jobs, s.organizations, s.gpus, s.span_s) == (3, 2, 2, 10, 10 * HOUR)
    assert s.gpu_hours == pytest.approx(20 + 160 + 1 / 60)
    assert s.total.demand_mean_gpus == pytest.approx(10)
    assert result.over_time["A10"].to_list()[:: spot2026.POINTS // 2] == [2.0, 0.0]


def test_demand_is_unknown_without_jobs(tmp_path: Path) -> None:
    """It is not 0, and the page says what is missing."""
    result = spot2026.analyse(spot2026.read(trace(tmp_path, None)))
    assert (result.summary.jobs, result.summary.total.demand_share, result.over_time.height) == (None, None, 0)
    page = spot_page.context(result, ())
    assert page.notes == (spot_page.NO_JOBS,)
    assert "not in the data" in page.answer
    with pytest.raises(InputError, match=r"has no job_info_df\.csv"):
        spot2026.job_log(spot2026.read(tmp_path))


def test_jobs_are_a_log_for_simulations(tmp_path: Path) -> None:
    """Sizes count thousandths of a GPU if a job holds a part; a job for a model without nodes is reported."""
    jobs = "1,13,A10,8,0.5,3,0,100,HP\n2,13,B200,8,1,1,5,0,Spot\n3,57,A10,8,0,1,5,60,Spot\n"
    read = spot2026.read(trace(tmp_path, jobs) / spot2026.JOBS_FILE)
    log = spot2026.job_log(read)
    assert (log.jobs.select("units", "run_s", "submit_s").rows(), log.capacity) == ([(1500, 100, 0)], 10)
    assert (log.parts, log.jobs_without_units) == (1000, 1)
    assert log.priorities is not None
    assert log.priorities.to_list() == [1]
    assert [part.reason for part in log.left_out] == ["without a run time"]
    assert spot2026.analyse(read).summary.jobs_without_nodes == 1


def test_times_and_sizes_beyond_a_log_are_left_out(tmp_path: Path) -> None:
    rows = ("13,A10,8,1,1,0,4e9", "13,A10,8,1,1,4e9,5", "13,A10,8,9e15,9e15,0,5", "13,A10,8,1,1,0,5")
    jobs = "".join(f"{number},{row},HP\n" for number, row in enumerate(rows))
    log = spot2026.job_log(spot2026.read(trace(tmp_path, jobs)))
    assert log.jobs.height == 1
    assert [(part.reason, part.jobs) for part in log.left_out] == [("beyond what a log can hold", 3)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1,13,A10,8,1,1,0,5,Low\n", "csv:2: job_type is neither HP nor Spot"),
        ("1,13,A10,8,1,,0,5,HP\n", "csv:2: has no number"),
        ("1,13,A10,8,1,1,0,-5,HP\n", "csv:2: has a negative"),
        ("1,13,A10,8,1,1,,5,HP\n", "csv:2: has no time of submission"),
        ("1,13,A10,8,1", "csv:2: is cut off"),
    ],
)
def test_bad_job_is_an_error(tmp_path: Path, row: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        spot2026.read(trace(tmp_path, row))


def test_directory_without_nodes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no node_info_df\.csv"):
        spot2026.read(tmp_path)


def test_published_nodes(shared_data: Path) -> None:
    """The list of nodes is here, the list of jobs is not: statements about the demand stay unknown."""
    s = spot2026.analyse(spot2026.read(shared_data / "alibaba-spot-gpu")).summary
    assert (s.nodes, s.gpus, s.gpu_models, s.jobs) == (4278, 10_412, 6, None)
    judged = claims.judge(claims.load("spot2026"), claims.flat(s.as_dict()))
    verdicts = {claim.id: claim.verdict for claim in judged}
    assert {name for name, verdict in verdicts.items() if verdict == claims.BORNE_OUT} == {"nodes", "models"}
    assert {name for name, verdict in verdicts.items() if verdict == claims.UNKNOWN} == set(verdicts) - {
        "nodes",
        "models",
    }
