"""Recordings of live clusters of each release: jobs, steps, nodes, partitions, configuration."""

from __future__ import annotations

import json

import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.model.cluster import GpuCount, NodeGpus
from slurm_affinode.slurm import live_records, pyslurm_client, scontrol


@pytest.fixture(params=["24.11", "26.05"])
def record(request, recorded):
    """Return a function that reads a recorded file of a release."""
    return lambda name: (recorded / "slurm" / request.param / name).read_bytes()


def jobs_of(record):
    records, answered = scontrol.document(record("jobs.json"), "jobs")
    assert answered
    return {job.id: job for job in scontrol.jobs(records)}


def test_recorded_jobs_are_read(record):
    """A GPU job with an odd name, an array, and multi-partition, held, deferred, heterogeneous and failed jobs."""
    jobs = jobs_of(record)
    first = jobs["1"]
    assert (first.name, first.comment, first.user, first.state) == ('tr|ain "x" é', "hello = world", "alice", "RUNNING")
    assert (first.gpus_requested, first.gpus_allocated) == (GpuCount(1, "h100"), GpuCount(1, "h100"))
    assert first.node_gpus == (NodeGpus("c1", 1, "h100", (0,)),)
    assert (first.time_limit_s, first.is_held, first.reason) == (1800, False, None)
    assert first.stdout == "/home/alice/out/1.txt"
    assert (jobs["2_1"].array_task_id, jobs["2_1"].gpus_requested) == (1, GpuCount(1))
    assert (jobs["2_[2-4]"].array_tasks, jobs["2_[2-4]"].array_limit, jobs["2_[2-4]"].stdout) == ("2-4", 1, None)
    assert set(jobs["3"].partitions) == {"gpu", "gpu-preempt"}
    assert (jobs["3"].gpus_requested, jobs["3"].node_count, jobs["3"].pending) == (GpuCount(4), 2, True)
    assert (jobs["4"].is_held, jobs["4"].priority, jobs["4"].reason) == (True, 0, "JobHeldUser")
    assert (jobs["5"].reason, jobs["5"].requeue, jobs["5"].time_limit_s) == ("BeginTime", False, None)
    assert jobs["5"].expected_start is not None
    assert (jobs["6+0"].job_id, jobs["6+1"].job_id) == (6, 7)


def test_recorded_steps_are_read(record):
    """The batch script and extern have no GPUs of their own, a step of srun has."""
    records, _ = scontrol.document(record("steps.json"), "steps")
    steps = {step.id: step for step in scontrol.steps(records)}
    assert {"1.batch", "1.extern", "1.0"} <= set(steps)
    assert (steps["1.0"].gpus, steps["1.0"].tasks, steps["1.0"].nodes) == (GpuCount(1, "h100"), 1, ("c1",))
    assert steps["1.batch"].gpus is None


def test_recorded_nodes_are_read(record):
    """A node without GPUs has None, one with idle GPUs 0."""
    records, _ = scontrol.document(record("nodes.json"), "nodes")
    nodes = {node.name: node for node in scontrol.nodes(records)}
    assert (nodes["c1"].gpus, nodes["c1"].gpus_used) == (GpuCount(2, "h100"), GpuCount(1, "h100"))
    assert (nodes["cpu1"].gpus, nodes["cpu1"].gpus_used, nodes["cpu1"].partitions) == (None, None, ("cpu",))
    assert (nodes["c1"].memory_mib, nodes["c1"].memory_used_mib, nodes["c1"].cpus_used) == (16000, 1000, 2)
    assert nodes["c1"].responding
    assert not nodes["c1"].draining


def test_recorded_partitions_and_configuration_are_read(record):
    partitions = {partition.name: partition for partition in scontrol.partitions(record("partitions.txt").decode())}
    assert [name for name, partition in partitions.items() if partition.default] == ["cpu"]
    assert (partitions["gpu"].nodes, partitions["gpu"].gpus) == (("c1", "c2"), GpuCount(4, "h100"))
    config = scontrol.config(record("config.txt").decode())
    assert "gres/gpu" in config["AccountingStorageTRES"].split(",")
    assert (config["MinJobAge"], config["JobRequeue"], config["PriorityParameters"]) == ("300 sec", "1", "")
    version = scontrol.version(record("version.txt").decode())
    assert scontrol.release(version) == scontrol.release(config["SLURM_VERSION"])


def test_pyslurm_has_the_same_jobs_and_nodes(recorded):
    """Recorded at the same time: they agree except for the scheduler's plan and fields that pyslurm does not have."""
    directory = recorded / "slurm" / "26.05"
    answers = [json.loads(line) for line in (directory / "pyslurm.jsonl").read_text().splitlines()]
    hello, jobs, nodes, steps = (answer["ok"] for answer in answers)
    assert hello["api"] == 45
    pyslurm_jobs = {job.id: job for job in pyslurm_client.jobs(jobs)}
    command_jobs = jobs_of(lambda name: (directory / name).read_bytes())
    assert pyslurm_jobs.keys() == command_jobs.keys()
    left_out = {"expected_start", "node_gpus", "steps", "priority", "state", "reason"}
    left_out |= {"nodes_required", "nodes_excluded", "nodes_expected"}  # the worker did not read these at the time
    for name, job in command_jobs.items():
        for attribute in set(job.__dataclass_fields__) - left_out:
            assert getattr(pyslurm_jobs[name], attribute) == getattr(job, attribute), (name, attribute)
    records, _ = scontrol.document((directory / "nodes.json").read_bytes(), "nodes")
    assert {node.name: node.gpus_used for node in pyslurm_client.nodes(nodes)} == {
        node.name: node.gpus_used for node in scontrol.nodes(records)
    }
    assert {"1.batch", "1.extern", "1.0"} <= {step.id for step in pyslurm_client.steps(steps)}


def test_invalid_json_is_reported_in_one_line():
    for data in (b"", b"slurm_load_jobs error", b"[]", b'{"jobs": 3}', b"\xff"):
        with pytest.raises(UnreachableError, match="returned no JSON"):
            scontrol.document(data, "jobs")


def test_empty_list_is_distinguished_from_no_answer():
    """The output looks like an empty queue when slurmctld is down, except for the time of the last update."""
    text = '{"jobs": [], "last_update": {"set": true, "infinite": false, "number": %d}}'
    assert scontrol.document((text % 0).encode(), "jobs") == ([], False)
    assert scontrol.document((text % 5).encode(), "jobs") == ([], True)


def test_empty_record_hides_no_other():
    """Unknown stays unknown; bytes that are not text are escaped."""
    assert scontrol.jobs([{}, {"job_id": "x"}]) == ()
    (job,) = scontrol.jobs([{"job_id": 7, "tres_alloc_str": "nonsense", "nodes": "c[", "gres_detail": ["?"]}])
    assert (job.id, job.state, job.nodes, job.tres_allocated, job.node_gpus) == ("7", "UNKNOWN", (), {}, ())
    records, _ = scontrol.document(b'{"jobs": [{"job_id": 1, "name": "a\xffb"}]}', "jobs")
    assert scontrol.jobs(records)[0].name == "a\\xffb"


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ("gpu:h100:2(IDX:0,3)", [NodeGpus("n", 2, "h100", (0, 3))]),
        ("gpu:4(IDX:0-3)", [NodeGpus("n", 4, None, (0, 1, 2, 3))]),
        ("gpu:a:1(IDX:0),gpu:b:2(IDX:2-3)", [NodeGpus("n", 1, "a", (0,)), NodeGpus("n", 2, "b", (2, 3))]),
        ("gpu:a100:1", [NodeGpus("n", 1, "a100")]),
        ("gpu:0", []),
        ("fpga:1(IDX:0)", []),
    ],
)
def test_gpus_of_a_node_by_number(detail, expected):
    assert list(live_records.node_gpus(["n"], [detail])) == expected


def test_state_is_one_word():
    assert live_records.state(["COMPLETED", "COMPLETING"]) == "COMPLETING"
    assert live_records.state(["RUNNING", "SIGNALING"]) == "SIGNALING"
    assert live_records.state([]) == "UNKNOWN"
