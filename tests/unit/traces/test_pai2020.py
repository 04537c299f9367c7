"""The PAI trace of 2020: its machines, and synthetic rows of the other tables in the published format."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import claims, pai2020, pai_page

HOUR = 3600
JOBS = "j1,i1,ua,Terminated,1000.0,9000.0\nj2,i2,ub,Running,2000.0,\nj3,i3,ua,Waiting,3000.0,0\nj4,i4,uc,Failed,10,20\n"
TASKS = (
    f"j1,ps,1.0,Terminated,1010.0,{1010 + HOUR}.0,600.0,29.3,,\n"
    f"j1,worker,2.0,Terminated,1060.0,{1060 + 2 * HOUR}.0,600.0,29.3,50.0,MISC\n"
    f"j2,tensorflow,1.0,Running,2100.0,,600.0,29.3,100.0,V100\n"
    f"j4,worker,1.0,Failed,40.0,{40 + HOUR}.0,600.0,29.3,100.0,T4\n"
)
SENSORS = (
    "j1,worker,w1,i1,m,/dev/nvidia0,140.1,0.0,1.4,2.3,8.0,9.0,1,1,1,1\n"
    "j1,worker,w2,i1,m,/dev/nvidia1,140.1,10.0,1.4,2.3,2.0,9.0,1,1,1,1\n"
    "j4,worker,w3,i4,m,/dev/nvidia0,140.1,120.0,1.4,2.3,4.0,9.0,1,1,1,1\n"
    "j2,tensorflow,w4,i2,m,/dev/nvidia0,140.1,,1.4,2.3,,,1,1,1,1\n"
)
TABLES = {"pai_job_table": JOBS, "pai_task_table": TASKS, "pai_sensor_table": SENSORS,
          "pai_machine_spec": "m,T4,96,512,2\nn,CPU,96,512,0\n"}  # fmt: skip


def archive(path: Path, member: str, text: str) -> None:
    with tarfile.open(path, "w:gz") as file:
        info = tarfile.TarInfo(member)
        info.size = len(text)
        file.addfile(info, io.BytesIO(text.encode()))


@pytest.fixture(params=["csv", "tar.gz"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tables as CSV files, or as archives."""
    for name, text in TABLES.items():
        if request.param == "csv":
            (tmp_path / f"{name}.csv").write_text(text)
        else:
            archive(tmp_path / f"{name}.tar.gz", f"./{name}.csv", text)
    (tmp_path / "pai_job_table.header").write_text("job_name,inst_id,user,status,start_time,end_time\n")
    return tmp_path


def test_plan_and_use_by_hand(directory: Path) -> None:
    """Half a GPU for two hours twice, one at 0 %; a whole one for an hour that uses more than planned."""
    tables = pai2020.read(directory)
    assert tables.missing == ()
    s = pai2020.analyse(tables)
    use = s.plan_use
    assert use is not None
    assert (use.records, use.planned_gpu_hours) == (3, pytest.approx(0.5 * 2 * 2 + 1))
    assert use.used_gpu_hours == pytest.approx(0.1 * 2 + 1.2)
    assert (use.idle_gpu_hours, use.idle_share) == (pytest.approx(1), pytest.approx(1 / 3))
    assert use.below_plan_share == pytest.approx(2 / 3)
    assert (use.memory_gb_h, use.idle_memory_share) == (pytest.approx(16 + 4 + 4), pytest.approx(16 / 24))
    assert [(bucket.label, bucket.records, bucket.memory_gb_h) for bucket in s.buckets if bucket.records] == [
        ("exactly 0 %", 1, 16.0), ("1-10 %", 1, 4.0), ("above 50 %", 1, 4.0),
    ]  # fmt: skip


def test_jobs_and_waits_by_hand(directory: Path) -> None:
    """The wait ends with the first task, with or without a GPU; unknown times are left out, and counted."""
    s = pai2020.analyse(pai2020.read(directory))
    assert s.wait_s is not None
    assert s.run_s is not None
    assert s.size is not None
    assert (s.jobs, s.users, s.gpu_jobs, s.gpu_tasks, s.tasks_without_times) == (4, 3, 3, 3, 1)
    assert (s.waits_known, s.wait_s.mean, s.run_s.max, s.size.max) == (3, pytest.approx(140 / 3), 2 * HOUR, 1.0)
    assert s.requested_gpu_hours == pytest.approx(0.5 * 2 * 2 + 1)
    assert s.job_statuses == {"Failed": 1, "Running": 1, "Terminated": 1, "Waiting": 1}
    assert (s.sensor_records, s.util_zero_share) == (4, pytest.approx(1 / 3))


def test_missing_table_is_unknown(directory: Path) -> None:
    """Without tasks there is no plan; the distribution of the utilization remains."""
    for file in directory.glob("pai_task_table.*"):
        file.unlink()
    tables = pai2020.read(directory)
    s = pai2020.analyse(tables)
    assert (s.plan_use, s.wait_s, s.requested_gpu_hours, s.buckets[0].memory_gb_h) == (None, None, None, None)
    assert s.util_zero_share == pytest.approx(1 / 3)
    page = pai_page.context(s, (), tables.missing)
    assert page.notes == ("pai_task_table is missing: the figures that need it are unknown",)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("pai_job_table", "j1,i1,ua,Lost,1,2\n", "csv:1: status Lost is unknown"),
        ("pai_task_table", "j1,ps,1.0,Failed\n", "csv:1: has another number of columns"),
        ("pai_task_table", "j1,ps,1.0,Failed,1,2,3,4,50.0,T4\nj1,ps,1.", "csv:2: is cut off"),
        ("pai_machine_spec", "m,T4,96,512,two\n", "csv:1: cap_gpu is not a number: two"),
        ("pai_machine_spec", "\n", "is empty"),
    ],
)
def test_bad_table_is_an_error(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(InputError, match=why):
        pai2020.read(tmp_path)


def test_damaged_archive_is_an_error(tmp_path: Path) -> None:
    """A truncated archive, one without the table, and a directory without any."""
    with pytest.raises(InputError, match="has none of the tables"):
        pai2020.read(tmp_path)
    path = tmp_path / "pai_machine_spec.tar.gz"
    archive(path, "notes.csv", "x")
    with pytest.raises(InputError, match=r"has no pai_machine_spec\.csv"):
        pai2020.read(tmp_path)
    archive(path, "pai_machine_spec.csv", "".join(f"m{at * 7919 % 10007},T4,96,512,2\n" for at in range(50_000)))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(InputError, match="cut off or damaged"):
        pai2020.read(tmp_path)
    (tmp_path / "pai_machine_spec.header").write_text("machine,gpu\n")
    with pytest.raises(InputError, match="has no column gpu_type, cap_gpu"):
        pai2020.read(tmp_path)


def test_published_machines(shared_data: Path) -> None:
    s = pai2020.analyse(pai2020.read(shared_data / "alibaba-gpu-v2020"))
    assert (s.machines, s.gpu_machines, s.capacity_gpus, s.jobs) == (1897, 1814, 6742, None)
    judged = claims.judge(claims.load("pai2020"), claims.flat(s.as_dict()))
    assert {claim.verdict for claim in judged} == {claims.BORNE_OUT, claims.UNKNOWN}
