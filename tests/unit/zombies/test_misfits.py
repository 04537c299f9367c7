"""Jobs with unsuitable requests, in a stored history."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from slurm_affinode.base.config import MisfitConfig, NodeClass

from .zombie_history import END, Site, computes, used_once


def test_misfits_are_found(site: Site) -> None:
    """Too many nodes, too powerful a GPU, a time limit far above the run time, too many cores."""
    site.job(1, [computes, computes], nodes=2, node_list="g1,g9")
    site.job(2, [lambda _: {"util_pct": 9.0, "fb_used_mib": 900.0}], node="g2", cpus=1, max_rss_bytes=2**30)
    site.job(3, [computes], node="g3", state="COMPLETED", end=END - timedelta(minutes=2), timelimit_s=4 * 86400,
             cpus=64, total_cpu_s=3600.0)  # fmt: skip
    site.job(4, [computes], node="g3")
    site.config = replace(
        site.config,
        zombies=replace(site.config.zombies, misfits=replace(site.config.zombies.misfits, cores_per_gpu=16.0)),
    )
    kinds = {(finding.job.job_id, finding.kind) for finding in site.find().findings if finding.job}
    assert kinds >= {(1, "fragmentation"), (2, "gpu-too-powerful"), (3, "time-limit"), (3, "cpu-cores-per-gpu")}
    assert (1, "squatter") not in kinds


def test_cpu_use_of_running_job_is_unknown(site: Site) -> None:
    """sacct adds up steps that have ended; 0 for a running job with one step does not mean idle cores."""
    site.config = replace(site.config, zombies=replace(site.config.zombies, nodes={"g*": NodeClass(64, 4, 512)}))
    site.job(1, [computes], cpus=32, total_cpu_s=0.0)
    site.job(2, [computes], node="g2", cpus=32, total_cpu_s=60.0, end=END - timedelta(minutes=1), state="COMPLETED")
    job_ids = [finding.job.job_id for finding in site.find(kinds=("cpu-cores-per-gpu",)).findings if finding.job]
    assert job_ids == [2]


def test_cpu_jobs_that_need_their_memory_are_not_reported(site: Site) -> None:
    """Memory in proportion to the cores, or that needs the nodes, blocks no other job; small jobs can be excluded."""
    gib = 2**30
    misfits = MisfitConfig(host_memory_min_gib_hours=1)
    site.config = replace(site.config, zombies=replace(site.config.zombies, nodes={"c*": NodeClass(64, 0, 256)},
                                                       misfits=misfits))  # fmt: skip
    cpu = {"partition": "cpu", "end": END - timedelta(minutes=1), "state": "COMPLETED", "total_cpu_s": 4 * 3600.0}
    site.job(1, [], node="c1", cpus=8, alloc_mem_bytes=200 * gib, max_rss_bytes=gib, **cpu)
    site.job(2, [], node="c1", cpus=8, alloc_mem_bytes=32 * gib, max_rss_bytes=gib, **cpu)
    site.job(3, [], node="c1", cpus=64, alloc_mem_bytes=256 * gib, max_rss_bytes=gib, **cpu)
    small = {**cpu, "nodes": 2, "cpus": 8}
    site.job(4, [], node="c[1-2]", alloc_mem_bytes=400 * gib, max_rss_bytes=gib, **small)
    site.job(5, [], node="c[1-2]", alloc_mem_bytes=400 * gib, max_rss_bytes=40 * gib, **small)
    findings = site.find(kinds=("host-memory", "cpu-fragmentation")).findings
    assert {(diagnosis.kind, diagnosis.job.job_id) for diagnosis in findings if diagnosis.job} == {
        ("host-memory", 1), ("host-memory", 4), ("host-memory", 5), ("cpu-fragmentation", 4)
    }  # fmt: skip
    few = replace(misfits, min_core_hours=100)
    site.config = replace(site.config, zombies=replace(site.config.zombies, misfits=few))
    assert not site.find(kinds=("host-memory", "cpu-fragmentation")).findings


def test_user_finding_matches_partition_filter(site: Site) -> None:
    """It is computed from the jobs of that partition."""
    site.config = replace(site.config, zombies=replace(site.config.zombies, misfits=MisfitConfig(user_min_gpu_hours=1)))
    site.job(1, [used_once])
    findings = site.find(kinds=("low-efficiency-user",), partitions=("gpu",)).findings
    assert [job.user for job in findings] == ["ann"]
    assert not site.find(kinds=("low-efficiency-user",), partitions=("cpu",)).findings


def test_clusters_and_replaced_gpus_are_kept_apart(site: Site) -> None:
    """A node of the same name has GPUs of its own, and a partition jobs of its own; a replaced GPU counts once."""
    site.job(1, [computes, None], nodes=2, node_list="g1,g2", partition="batch")
    site.job(2, [computes] * 2, cluster="d", partition="other")
    site.job(3, [computes], node="g3", partition="batch")
    site.job(4, [], cluster="d", node="c1", cpus=4, partition="batch")
    site.job(5, [computes], hours=12, partition="batch", end=END - timedelta(hours=8), state="COMPLETED")
    for sample in site.samples:
        sample["cluster"] = "d" if sample["job"] == "2" else "c"
    site.samples = [item for item in site.samples if item["job"] != "5" or item["time"] < END - timedelta(hours=8)]
    findings = site.find(kinds=("fragmentation", "cpu-only-in-gpu-partition"), since=END - timedelta(hours=12)).findings
    assert not findings
