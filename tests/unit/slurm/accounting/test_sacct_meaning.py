"""Meaning of accounting records: attempts, steps, arrays, time zones, memory, and GPUs counted, unknown or none."""

from __future__ import annotations

from datetime import UTC, datetime

import polars as pl
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.slurm import units
from slurm_affinode.slurm.accounting.sacct import SacctReading, read
from slurm_affinode.slurm.accounting.schema import Accounting


def parse(text: str, **how: object) -> Accounting:
    """Read ``text``."""
    return read(text.encode(), where="in", reading=SacctReading(**how))  # type: ignore[arg-type]


def utc(text: str) -> datetime:
    """Return an aware time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_each_attempt_of_a_requeued_job_keeps_its_steps() -> None:
    """The submit time of a step is its start; the step belongs to the attempt printed before it."""
    parsed = parse(
        "JobIDRaw|JobID|State|Submit|Start|End|MaxRSS\n"
        "5|5|REQUEUED|2026-01-01T10:00:00|2026-01-01T10:01:00|2026-01-01T10:30:00|\n"
        "5.batch|5.batch|CANCELLED|2026-01-01T10:01:00|2026-01-01T10:01:00|2026-01-01T10:30:00|100K\n"
        "5|5|RUNNING|2026-01-01T10:30:00|2026-01-01T10:33:00|Unknown|\n"
        "5.batch|5.batch|RUNNING|2026-01-01T10:33:00|2026-01-01T10:33:00|Unknown|200K\n"
    )
    assert parsed.jobs.select("submit", "end", "max_rss_bytes").rows() == [
        (utc("2026-01-01T10:00:00"), utc("2026-01-01T10:30:00"), 102400),
        (utc("2026-01-01T10:30:00"), None, 204800),
    ]
    assert parsed.steps["submit"].to_list() == parsed.jobs["submit"].to_list()


def test_step_that_may_be_of_several_runs_is_of_none() -> None:
    """It is printed before the runs, and its start is unknown."""
    parsed = parse(
        "JobID|State|Submit|Start|End|MaxRSS\n"
        "5.0|COMPLETED|Unknown|Unknown|Unknown|100K\n"
        "5.1|COMPLETED|2026-01-01T11:05:00|2026-01-01T11:05:00|2026-01-01T11:06:00|200K\n"
        "5|REQUEUED|2026-01-01T10:00:00|2026-01-01T10:01:00|2026-01-01T10:30:00|\n"
        "5|COMPLETED|2026-01-01T10:40:00|2026-01-01T11:00:00|2026-01-01T12:00:00|\n"
    )
    assert parsed.jobs["max_rss_bytes"].to_list() == [None, 204800]
    assert [problem.reason for problem in parsed.problems if problem.job == "5.0"] == [
        "a step that may be of several runs of its job"
    ]


def test_successive_attempts_with_one_submit_time_are_kept_apart() -> None:
    """Slurm gives each attempt a submit time of its own, but a file may repeat the first one."""
    parsed = parse(
        "JobID|State|Submit|Start|End|MaxRSS\n"
        "5|COMPLETED|2026-01-01T10:00:00|2026-01-01T12:00:00|2026-01-01T13:00:00|\n"
        "5|NODE_FAIL|2026-01-01T10:00:00|2026-01-01T10:01:00|2026-01-01T10:30:00|\n"
        "5.batch|CANCELLED|2026-01-01T10:01:00|2026-01-01T10:01:00|2026-01-01T10:30:00|100K\n"
        "5|PREEMPTED|2026-01-01T10:00:00|2026-01-01T10:33:00|2026-01-01T11:00:00|\n"
        "5|PREEMPTED|2026-01-01T10:00:00|2026-01-01T10:33:00|Unknown|\n"
    )
    assert parsed.jobs.sort("start").select("submit", "start", "state", "max_rss_bytes").rows() == [
        (utc("2026-01-01T10:00:00"), utc("2026-01-01T10:01:00"), "NODE_FAIL", 102400),
        (utc("2026-01-01T10:30:00"), utc("2026-01-01T10:33:00"), "PREEMPTED", None),
        (utc("2026-01-01T11:00:00"), utc("2026-01-01T12:00:00"), "COMPLETED", None),
    ]


def test_steps_out_of_order_are_assigned_by_their_times() -> None:
    """A sorted file has both attempts before both steps."""
    parsed = parse(
        "JobID|Submit|Start|End\n"
        "5|2026-01-01T10:00:00|2026-01-01T10:01:00|2026-01-01T10:30:00\n"
        "5|2026-01-01T10:30:00|2026-01-01T10:33:00|Unknown\n"
        "5.0|2026-01-01T10:01:10|2026-01-01T10:01:10|2026-01-01T10:02:00\n"
        "5.1|2026-01-01T10:40:00|2026-01-01T10:40:00|Unknown\n"
    )
    assert parsed.steps.sort("step_id")["submit"].to_list() == [utc("2026-01-01T10:00:00"), utc("2026-01-01T10:30:00")]


def test_step_without_its_job_is_reported() -> None:
    """It cannot be assigned."""
    parsed = parse("JobID|State\n1|FAILED\n2.batch|FAILED\n")
    assert str(parsed.problems[0]) == "job 2.batch: a step whose job is not in this input"
    assert parsed.steps.is_empty()
    with pytest.raises(InputError, match="in:3"):
        parse("JobID|State\n1|FAILED\n2.batch|FAILED\n", strict=True)


def test_arrays_and_heterogeneous_jobs_are_read() -> None:
    """The raw ID is the key; the printed ID has array and component."""
    parsed = parse(
        "JobIDRaw|JobID|State\n21|4_1|COMPLETED\n4|4_[2-9%2]|PENDING\n12|12+0|COMPLETED\n13|12+1|COMPLETED\n"
        "13.0|12+1.0|COMPLETED\n12.0+1|12+0.0+1|COMPLETED\n"
    )
    columns = ["job_id", "array_job_id", "array_task_id", "array_spec", "het_job_id", "het_offset"]
    assert parsed.jobs.select(columns).rows() == [
        (21, 4, 1, None, None, None),
        (4, 4, None, "2-9%2", None, None),
        (12, None, None, None, 12, 0),
        (13, None, None, None, 12, 1),
    ]
    assert parsed.steps.select("job_id", "step_id").rows() == [(13, "0"), (12, "0+1")]


def test_array_tasks_without_raw_ids_get_substitutes() -> None:
    """The substitutes are distinct and reported; components follow their leader."""
    parsed = parse("JobID|State\n4_1|COMPLETED\n4_2|COMPLETED\n4_2.batch|COMPLETED\n12+1|COMPLETED\n")
    ids = parsed.jobs["job_id"].to_list()
    assert len(set(ids)) == 3
    assert ids[0] < 0 > ids[1]
    assert ids[2] == 13
    assert parsed.steps["job_id"].to_list() == [ids[1]]
    assert "substitutes" in parsed.notes[0]


def test_repeated_record_is_one_attempt_and_the_ended_one_wins() -> None:
    """Overlapping files contain the same attempt twice."""
    lines = [
        "5|2026-01-01T10:00:00|2026-01-01T10:01:00|2026-01-01T10:30:00|COMPLETED\n",
        "5.0|2026-01-01T10:01:00|2026-01-01T10:01:00|2026-01-01T10:30:00|COMPLETED\n",
        "5|2026-01-01T10:00:00|2026-01-01T10:01:00|Unknown|RUNNING\n",
        "5.0|2026-01-01T10:01:00|2026-01-01T10:01:00|Unknown|RUNNING\n",
    ]
    for order in (lines, lines[2:] + lines[:2]):
        parsed = parse("JobID|Submit|Start|End|State\n" + "".join(order))
        assert parsed.jobs["state"].to_list() == ["COMPLETED"]
        assert parsed.steps["state"].to_list() == ["COMPLETED"]


def test_job_ids_are_per_cluster() -> None:
    """The same ID on two clusters is two jobs, each with its steps."""
    parsed = parse("Cluster|JobID|State\na|1|FAILED\na|1.0|FAILED\nb|1|FAILED\nb|1.1|FAILED\n|2|FAILED\n", cluster="z")
    assert parsed.jobs.select("cluster", "job_id").rows() == [("a", 1), ("b", 1), ("z", 2)]
    assert parsed.steps.select("cluster", "step_id").rows() == [("a", "0"), ("b", "1")]


def test_local_times_are_in_the_given_time_zone() -> None:
    """Winter and summer differ; an offset in the input takes precedence over the time zone."""
    text = "JobID|Submit|Start|End\n1|2026-01-01T10:00:00|2026-07-01T10:00:00|2026-07-01T11:00:00+05:30\n"
    parsed = parse(text.replace("T11", "T14"), zone="Europe/Oslo")
    job = parsed.jobs.row(0, named=True)
    assert job["submit"] == utc("2026-01-01T09:00:00")
    assert job["start"] == utc("2026-07-01T08:00:00")
    assert job["end"] == utc("2026-07-01T08:30:00")


def test_epoch_seconds_and_compact_offsets_are_read() -> None:
    """The forms of SLURM_TIME_FORMAT may be mixed."""
    parsed = parse(
        "JobID|Submit|Start|End\n1|1767261600|2026-01-01T11:00:00+0100|2026-01-01T12:00:00Z\n", zone="Asia/Kolkata"
    )
    assert parsed.jobs.select("submit", "start", "end").row(0) == (
        utc("2026-01-01T10:00:00"), utc("2026-01-01T10:00:00"), utc("2026-01-01T12:00:00")
    )  # fmt: skip


def test_ambiguous_time_of_a_suspended_job_is_decided_with_its_suspended_time() -> None:
    """Elapsed is without the two hours in which Slurm had suspended the job."""
    text = (
        "JobID|Submit|Start|End|Elapsed|Suspended\n"
        "1|2026-10-25T01:00:00|2026-10-25T02:30:00|2026-10-25T05:30:00|02:00:00|02:00:00\n"
        "2|2026-10-25T01:00:00|2026-10-25T02:30:00|2026-10-25T05:30:00|02:00:00|01:00:00\n"
    )
    parsed = parse(text, zone="Europe/Oslo")
    assert parsed.jobs["start"].to_list() == [utc("2026-10-25T00:30:00"), utc("2026-10-25T01:30:00")]
    assert parsed.jobs["suspended_s"].to_list() == [7200, 3600]


def test_times_that_the_record_leaves_open_are_recorded() -> None:
    """Both times of job 1 are in the repeated hour; Elapsed decides for job 2."""
    parsed = parse(
        "JobID|State|Submit|Start|End|Elapsed\n"
        "1|COMPLETED|2026-10-25T01:00:00|2026-10-25T02:10:00|2026-10-25T02:40:00|00:30:00\n"
        "2|COMPLETED|2026-10-25T01:00:00|2026-10-25T02:10:00|2026-10-25T02:40:00|01:30:00\n"
        "3|COMPLETED|2026-10-25T01:00:00|2026-10-25T03:10:00|2026-10-25T03:40:00|00:30:00\n",
        zone="Europe/Oslo",
    )
    assert parsed.jobs["time_doubt_s"].to_list() == [3600, 0, 0]


def test_suspended_time_is_part_of_a_run_and_not_of_its_elapsed_time() -> None:
    """A run without an end ended Elapsed and Suspended after its start; Elapsed is computed without Suspended."""
    parsed = parse(
        "JobID|State|Submit|Start|End|Elapsed|Suspended\n"
        "1|COMPLETED|1767261600|1767261600|Unknown|01:00:00|00:30:00\n"
        "2|COMPLETED|1767261600|1767261600|1767268800||00:30:00\n"
        "3|COMPLETED|1767261600|1767261600|1767268800|02:00:00|\n",
        zone="UTC",
    )
    rows = parsed.jobs.select(pl.col("end").dt.epoch("s") - 1767261600, "elapsed_s", "suspended_s").rows()
    assert rows == [(5400, 3600, 1800), (7200, 5400, 1800), (7200, 7200, None)]


def test_ambiguous_time_is_decided_by_elapsed_and_reported() -> None:
    """Clocks in Oslo are set back on 25 October 2026 at 03:00."""
    parsed = parse(
        "JobID|Submit|Start|End|ElapsedRaw\n"
        "1|2026-10-25T01:00:00|2026-10-25T02:30:00|2026-10-25T03:30:00|3600\n"
        "2|2026-10-25T01:00:00|2026-10-25T02:30:00|2026-10-25T03:30:00|7200\n"
        "3|2026-10-25T01:00:00|2026-10-25T02:30:00|Unknown|60\n"
        "1.0|2026-10-25T02:30:00|2026-10-25T02:30:00|2026-10-25T02:31:00|60\n",
        zone="Europe/Oslo",
    )
    assert parsed.jobs["start"].to_list() == [
        utc("2026-10-25T01:30:00"), utc("2026-10-25T00:30:00"), utc("2026-10-25T00:30:00")
    ]  # fmt: skip
    assert parsed.steps["start"].to_list() == [utc("2026-10-25T01:30:00")]
    assert len(parsed.decisions) == 6
    assert str(parsed.decisions[0]) == ("job 1: start 2026-10-25T02:30:00 exists twice: taken as 2026-10-25T01:30:00Z")


def test_nonexistent_time_is_decided_and_reported() -> None:
    """Clocks in Oslo are set forward on 29 March 2026 at 02:00."""
    parsed = parse("JobID|Start|End\n1|2026-03-29T02:30:00|2026-03-29T04:30:00\n", zone="Europe/Oslo")
    assert parsed.jobs["start"].to_list() == [utc("2026-03-29T01:30:00")]
    assert not parsed.decisions[0].exists
    assert "does not exist" in str(parsed.decisions[0])


def test_gpus_are_counted_none_or_unknown() -> None:
    """They are 0 only if the cluster counts GPUs and the allocation is known; a pending job has no allocation."""
    head = "JobID|Cluster|Start|End|AllocTRES|ReqTRES\n"
    ran = "2026-01-01T10:00:00|2026-01-01T11:00:00"
    parsed = parse(
        head
        + f"1|a|{ran}|cpu=1,gres/gpu=2|cpu=1,gres/gpu=2\n"
        + f"2|a|{ran}|cpu=1|cpu=1\n"
        + f"3|a|{ran}||cpu=1\n"
        + "4|a|Unknown|Unknown||cpu=1,gres/gpu=8\n"
        + f"5|b|{ran}|cpu=1|cpu=1\n"
    )
    assert parsed.jobs["gpus"].to_list() == [2, 0, None, None, None]
    assert parsed.jobs["req_gpus"].to_list() == [2, None, None, 8, None]
    assert parsed.gpu_clusters == {"a"}
    known = parse(head + f"5|b|{ran}|cpu=1|cpu=1\n", counting=frozenset({"b"}))
    assert known.jobs["gpus"].to_list() == [0]


def test_gpus_in_steps_only_are_those_of_their_attempt() -> None:
    """A step has its GPUs from the job; whether several steps had the same GPUs is unknown."""
    times = "2026-01-01T10:00:00|2026-01-01T10:01:00|2026-01-01T10:30:00"
    parsed = parse(
        "JobID|State|Submit|Start|End|AllocTRES\n"
        f"1|COMPLETED|{times}|cpu=1,node=1\n1.0|COMPLETED|{times}|cpu=1,gres/gpu=2\n1.1|COMPLETED|{times}|gres/gpu=1\n"
        f"2|COMPLETED|{times}|\n2.0|COMPLETED|{times}|gres/gpu=1\n"
        f"3|COMPLETED|{times}|cpu=1,gres/gpu=4\n3.0|COMPLETED|{times}|cpu=1,gres/gpu=2\n"
        f"4|COMPLETED|{times}|cpu=1\n4.0|COMPLETED|{times}|cpu=1\n"
    )
    assert parsed.jobs["gpus"].to_list() == [2, 1, 4, 0]


@pytest.mark.parametrize(
    ("column", "cell", "gpus"),
    [("AllocGRES", "gpu:a100:4", 4), ("AllocGRES", "", 0), ("ReqTRES", "cpu=1,gres/gpu=3", 3), ("NNodes", "1", None)],
)
def test_gpus_without_allocated_tres(column: str, cell: str, gpus: int | None) -> None:
    """AllocGRES of old releases is used, else the requested GPUs; otherwise they are unknown."""
    ran = "2026-01-01T10:00:00|2026-01-01T11:00:00"
    parsed = parse(f"JobID|Start|End|{column}\n1|{ran}|{cell}\n", counting=frozenset({"default"}))
    assert parsed.jobs["gpus"].to_list() == [gpus]


def test_requested_memory_per_node_and_per_cpu() -> None:
    """It is multiplied by the requested nodes or CPUs; without ReqMem, ReqTRES is used."""
    parsed = parse(
        "JobID|Start|ReqMem|ReqNodes|ReqCPUS|NNodes|AllocCPUS|ReqTRES\n"
        "1|2026-01-01T10:00:00|4Gn|2|8|2|8|\n"
        "2|2026-01-01T10:00:00|500Mc|1|8|1|16|\n"
        "3|2026-01-01T10:00:00|10G|1|8|1|8|\n"
        "4|2026-01-01T10:00:00||1|8|1|8|cpu=8,mem=3G\n"
    )
    assert parsed.jobs["req_mem_bytes"].to_list() == [8 << 30, 4000 << 20, 10 << 30, 3 << 30]


def test_time_limits_are_read() -> None:
    """Minutes in the raw column, durations in the other; UNLIMITED is a flag, not a number."""
    raw = parse("JobID|TimelimitRaw\n1|1440\n2|UNLIMITED\n3|Partition_Limit\n")
    spans = parse("JobID|Timelimit\n1|1-00:00:00\n2|UNLIMITED\n3|Partition_Limit\n")
    for result in (raw, spans):
        assert result.jobs["timelimit_s"].to_list() == [86400, None, None]
        assert result.jobs["timelimit_unlimited"].to_list() == [False, True, None]


def test_usage_of_cpu_memory_energy_and_gpus() -> None:
    """Peak values are those of steps; an energy of 0 was not measured; a time with a missing part is unknown."""
    usage = "cpu=00:01:00,energy=5,gres/gpumem=1024M,gres/gpuutil=97,mem=200K"
    parsed = parse(
        "JobID|UserCPU|SystemCPU|TRESUsageInMax|ConsumedEnergyRaw\n"
        f"1|00:10.5|1-00:00:00||0\n1.0|00:00:00|01:00|{usage}|1500\n1.1||01:00|mem=1M|18446744073709551614\n"
    )
    assert parsed.jobs.select("total_cpu_s", "energy_j", "max_rss_bytes").row(0) == (86410.5, None, 1 << 20)
    assert parsed.steps.select(
        "total_cpu_s", "max_rss_bytes", "gpu_util_max_pct", "gpu_mem_max_bytes", "energy_j"
    ).rows() == [
        (60.0, 204800, 97.0, 1 << 30, 1500.0),
        (None, 1 << 20, None, None, None),
    ]


def test_ended_attempt_without_end_ended_elapsed_after_its_start() -> None:
    """Without the End field no ended attempt would ever end; a running one has no end."""
    parsed = parse(
        "JobID|State|Start|Elapsed|AllocTRES\n"
        "1|TIMEOUT|2026-01-01T10:00:00|1-00:00:00|gres/gpu=1\n1.batch|CANCELLED|2026-01-01T10:00:00|01:00:00|\n"
        "2|RUNNING|2026-01-01T10:00:00|02:00:00|gres/gpu=1\n3|CANCELLED by 1000|Unknown|00:00:00|\n"
    )
    assert parsed.jobs["end"].to_list() == [utc("2026-01-02T10:00"), None, None]
    assert parsed.steps["end"].to_list() == [utc("2026-01-01T11:00")]
    assert not parsed.notes


def test_ended_attempt_with_unknown_end_is_reported() -> None:
    """It has neither End nor Elapsed, and would count until now."""
    parsed = parse("JobID|State|Start|End\n1|FAILED|2026-01-01T10:00:00|Unknown\n")
    assert parsed.jobs["end"].to_list() == [None]
    assert parsed.notes[0].startswith("1 run is over, but without End and Elapsed")


def test_energy_has_powers_of_1000() -> None:
    """sacct divides ConsumedEnergy by 1000, but memory sizes by 1024."""
    parsed = parse("JobID|ConsumedEnergy\n1|1.5M\n2|4217\n3|NaN\n4|1.2x\n")
    assert parsed.jobs["energy_j"].to_list() == [1.5e6, 4217.0, None, None]
    assert [problem.line for problem in parsed.problems] == [5]


@pytest.mark.parametrize(
    ("tres", "why"),
    [
        ("gres/gpu=99999999999999999999", "more than any job has"),
        ("gres/gpu:a=9999999,gres/gpu:b=9999999", "more than any job has"),
        ("gres/gpu=1.5", "'1.5' is not a whole number"),
        ("gres/gpu:a=0.5,gres/gpu:b=0.5", "'0.5' is not a whole number"),
        ("gres/gpu=1.21K", "'1.21K' is not a whole number"),
        ("gres/gpu=-1", "'-1' is not a count"),
        ("gres/gpu=two", "'two' is not a count"),
        ("gres/gpu=nan", "'nan' is not a count"),
    ],
)
def test_unreadable_gpu_count_is_unknown(tres: str, why: str) -> None:
    """The value is neither rounded nor 0: line and column are reported, and the record counts."""
    ran = "2026-01-01T10:00:00"
    parsed = parse(
        f"JobID|Start|AllocTRES|ReqTRES\n1|{ran}|cpu=4,{tres}|{tres}\n2|{ran}|gres/gpu=2|gres/gpu=2\n3|{ran}|cpu=1|\n"
    )
    assert parsed.jobs.select("job_id", "gpus", "req_gpus", "cpus").rows() == [
        (1, None, None, 4), (2, 2, 2, None), (3, 0, None, 1)
    ]  # fmt: skip
    assert [(problem.line, problem.job, problem.field, problem.dropped) for problem in parsed.problems] == [
        (2, "1", "AllocTRES", False), (2, "1", "ReqTRES", False)
    ]  # fmt: skip
    assert why in str(parsed.problems[0])


@pytest.mark.parametrize("gres", ["gpu:1.5", "gpu:a100:0.5", "gpu:-1", "gpu:tesla=1.5"])
def test_unreadable_gres_is_reported(gres: str) -> None:
    """A fraction is not a GPU type."""
    with pytest.raises(ValueError, match="not a whole number"):
        units.parse_gres(gres)


def test_nodes_and_cpus_are_read_from_the_available_columns() -> None:
    """Their own columns are used first, then TRES, then the node list."""
    ran = "2026-01-01T10:00:00"
    parsed = parse(
        f"JobID|Start|NodeList|AllocTRES\n1|{ran}|n[1-3]|cpu=6,node=3\n2|{ran}|n[1-2]|\n3|{ran}|None assigned|\n"
    )
    assert parsed.jobs.select("nodes", "cpus", "node_list").rows() == [
        (3, 6, "n[1-3]"), (2, None, "n[1-2]"), (None, None, None)
    ]  # fmt: skip


def test_excessive_node_list_is_reported_and_unknown() -> None:
    """It would name more nodes than there are."""
    parsed = parse("JobID|Start|NodeList\n1|2026-01-01T10:00:00|n[1-999999999]\n")
    assert parsed.jobs["node_list"].to_list() == [None]
    assert "NodeList" in str(parsed.problems[0])
    assert parsed.bad_records == 0


def test_real_sacct_output_of_a_gpu_cluster(shared_data: object) -> None:
    """876 records, 294 allocations, 84 with GPUs, 39.0 GPU-hours; one GPU job reached its time limit."""
    result = read(shared_data / "jobanalyzer" / "sacct_p.txt")  # type: ignore[operator]
    with_gpus = result.jobs.filter(pl.col("gpus") > 0)
    hours = (with_gpus["gpus"] * with_gpus["elapsed_s"]).sum() / 3600
    assert (result.records, result.jobs.height, with_gpus.height) == (876, 294, 84)
    assert round(hours, 1) == 39.0
    # Four never got an allocation: they started and ended in the same second, on no node.
    assert result.jobs.filter(pl.col("gpus").is_null()).select("elapsed_s", "node_list").rows() == [(0, None)] * 4
    late = result.jobs.filter(pl.col("state") == "TIMEOUT").row(0, named=True)
    assert (late["job_id"], late["gpus"], late["gpu_type"]) == (1639021, 1, "a100")
    assert late["start"] == utc("2025-05-02T12:09:52")
    assert not result.problems


def test_priority_is_read_and_unknown_where_it_is_not_printed() -> None:
    """A held job has priority 0."""
    parsed = parse(
        "JobIDRaw|Priority|State\n1|4294901759|PENDING\n2|0|PENDING\n3||RUNNING\n3.batch||RUNNING\n", zone="UTC"
    )
    assert parsed.jobs["priority"].to_list() == [4294901759, 0, None]
    assert parse("JobIDRaw|State\n1|PENDING\n", zone="UTC").jobs["priority"].to_list() == [None]
