"""Traces as logs of jobs for the simulation: sizes, times, and what is left out. All files are synthetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import alibaba_instances, queue_logs
from slurm_affinode.traces.job_log import UNKNOWN, check_complete

POD_COLUMNS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)


def pods(directory: Path, *rows: str) -> Path:
    (directory / alibaba_instances.PAI_PODS).write_text(POD_COLUMNS + "".join(f"{row}\n" for row in rows))
    (directory / alibaba_instances.PAI_NODES).write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,64000,1,2,T4\n")
    return directory


def test_parts_of_gpus_are_thousandths(tmp_path: Path) -> None:
    """Half a GPU and two GPUs of a cluster of two; a pod without a GPU is no job."""
    log = queue_logs.read("pai2023", pods(
        tmp_path, "p1,1,1,1,500,,LS,Succeeded,10,110,30", "p2,1,1,2,1000,,LS,Failed,20,50,20",
        "p3,1,1,0,0,,LS,Succeeded,0,9,1",
    ))  # fmt: skip
    assert log.jobs.select("number", "submit_s", "run_s", "units", "wait_s", "request_s").rows() == [
        (2, 10, 80, 500, 20, UNKNOWN), (3, 20, 30, 2000, 0, UNKNOWN),
    ]  # fmt: skip
    assert (log.parts, log.capacity, log.unit, log.jobs_without_units, log.left_out) == (1000, 2, "GPU", 1, ())


def test_censored_pods_are_left_out_with_their_hours(tmp_path: Path) -> None:
    """One pod ran for an hour and was still running, one ended after an hour, one was never scheduled."""
    log = queue_logs.read("pai2023", pods(
        tmp_path, "p1,1,1,1,500,,LS,Succeeded,0,3600,0", "p2,1,1,1,500,,LS,Running,0,3600,0",
        "p3,1,1,1,500,,LS,Pending,5,3600,",
    ))  # fmt: skip
    assert [(group.reason, group.jobs, group.unit_hours, group.share) for group in log.left_out] == [
        ("that were not scheduled", 1, 0.0, 0.0), ("that had not ended when they were last seen", 1, 0.5, 0.5),
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"2 of 3 jobs, with 50\.0% of the GPU-hours, are left out.*list_default"):
        check_complete(log, log.left_out, partial=False)


def test_instances_that_began_before_the_trace_are_left_out(tmp_path: Path) -> None:
    head = "instance_sn,role,app_name,cpu_request,gpu_request,memory_request,creation_time,scheduled_time,deletion_time"
    file = tmp_path / alibaba_instances.DLRM_FILE
    file.write_text(f"{head}\ni0,HN,a,8,1,40.0,,,7200\ni1,HN,b,8,1,40.0,0,3600,7200\ni2,CN,b,8,0,40.0,0,3600,7200\n"
                    "i3,HN,b,8,1,40.0,100,3600,\n")  # fmt: skip
    log = queue_logs.read("dlrm2025", tmp_path)
    assert log.jobs.select("number", "submit_s", "run_s", "units", "wait_s").rows() == [(3, 0, 3600, 1, 3600)]
    assert [(group.reason, group.unit_hours) for group in log.left_out] == [
        ("that began before the trace", 2.0), ("that had not ended when they were last seen", 1.0),
    ]  # fmt: skip
    assert (log.parts, log.capacity, log.jobs_without_units) == (1, None, 1)


def test_gang_of_pai_tasks_is_one_job(tmp_path: Path) -> None:
    """Two workers with half a GPU each, from the first start to the last end; the wait ends with the first task."""
    (tmp_path / "pai_job_table.csv").write_text(
        "j1,i1,ua,Terminated,100.0,9000.0\nj2,i2,ub,Running,2000.0,\nj3,i3,ua,Terminated,50.0,90.0\n"
    )
    (tmp_path / "pai_task_table.csv").write_text(
        "j1,ps,1.0,Terminated,110.0,4000.0,600.0,29.3,,\nj1,worker,2.0,Terminated,160.0,3760.0,600.0,29.3,50.0,MISC\n"
        "j2,tensorflow,1.0,Running,2100.0,,600.0,29.3,100.0,V100\nj3,cpu,1.0,Terminated,60.0,80.0,600.0,29.3,,\n"
    )
    (tmp_path / "pai_machine_spec.csv").write_text("m,T4,96,512,2\nn,CPU,96,512,0\n")
    log = queue_logs.read("pai2020", tmp_path)
    assert log.jobs.select("number", "submit_s", "run_s", "units", "wait_s").rows() == [(1, 100, 3600, 1, 10)]
    assert (log.capacity, log.jobs_without_units, [group.jobs for group in log.left_out]) == (2, 1, [1])
    assert "without a start or an end of a task" in log.left_out[0].reason


def test_pai_without_tasks_cannot_be_simulated(tmp_path: Path) -> None:
    (tmp_path / "pai_job_table.csv").write_text("j1,i1,ua,Terminated,100.0,9000.0\n")
    with pytest.raises(InputError, match="needs pai_job_table and pai_task_table"):
        queue_logs.read("pai2020", tmp_path)


def test_scheduler_logs_have_waits_and_capacity(tmp_path: Path) -> None:
    (tmp_path / "cluster_log.csv").write_text(
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration\n"
        "1,u1,v,2,8,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:01:00,2020-04-01 01:01:00,3600\n"
    )
    (tmp_path / "cluster_gpu_number.csv").write_text("date,total\n2020-04-01,8\n")
    log = queue_logs.read("helios", tmp_path)
    assert log.jobs.select("run_s", "units", "wait_s").rows() == [(3600, 2, 60)]
    assert log.capacity == 8


def test_published_traces_are_read(shared_data: Path) -> None:
    """More than a tenth of the pods and instances was still running, so both need --partial."""
    pai = queue_logs.read("pai2023", shared_data / "alibaba-gpu-v2023")
    dlrm = queue_logs.read("dlrm2025", shared_data / "alibaba-gpu-v2025")
    for log, gpus in ((pai, 6212), (dlrm, None)):
        assert log.capacity == gpus
        assert log.jobs["run_s"].min() >= 1  # type: ignore[operator]
        with pytest.raises(InputError, match="are left out"):
            check_complete(log, log.left_out, partial=False)
        check_complete(log, log.left_out, partial=True)
    assert pai.rows + (pai.jobs_without_units or 0) == 8_152
    assert dlrm.rows + (dlrm.jobs_without_units or 0) == 23_871
