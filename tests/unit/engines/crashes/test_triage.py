"""Triage: the cause among several failures, accounting, holders, doubts and advice."""

# ruff: noqa: E501 - messages as the programs write them

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slurm_affinode.engines.crashes.crash_log import KINDS, LogFailure, LogFindings, scan
from slurm_affinode.engines.crashes.triage import CrashTriage, JobOutcome, triage

GIB = 2**30
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which "
    "1.00 GiB is free. Including non-PyTorch memory, this process has 48.00 GiB memory in use. Process 9 has 31.00 GiB memory in use.\n"
)
OOM_KILL = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks have been OOM Killed.\n"
)
NCCL = "[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, ncclRemoteError\n"
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"


def log(text: str) -> LogFindings:
    return scan(iter([text.encode()]), "job.out")


def triage_text(text: str, state: str | None = None, **more: int) -> CrashTriage:
    job = None if state is None else JobOutcome(7, state, **more)  # type: ignore[arg-type]
    return triage([log(text)], job)


def test_cause_is_the_failure_that_explains_the_others() -> None:
    result = triage_text(NCCL + DEAD + TORCH + DEAD)
    assert (result.kind, result.memory) == ("gpu-out-of-memory", "gpu")
    assert (result.requested, result.free, result.total) == (2 * GIB, GIB, 80 * GIB)
    assert result.holders == (("this process", 48 * GIB), ("PID 9", 31 * GIB))
    assert len(result.failures) == 3


def test_oom_kill_recorded_by_slurm_decides() -> None:
    result = triage_text(TORCH + OOM_KILL, "OUT_OF_MEMORY", memory_bytes=32 * GIB, max_rss_bytes=31 * GIB)
    assert (result.kind, result.memory, result.total) == ("job-memory-limit", "job", 32 * GIB)
    assert any("GPU memory" in doubt for doubt in result.doubts)
    assert "32 GiB" in result.summary
    assert triage_text(OOM_KILL, "OUT_OF_MEMORY").confidence == 1.0


def test_oom_kill_is_known_from_accounting_alone() -> None:
    result = triage([], JobOutcome(7, "OUT_OF_MEMORY", memory_bytes=GIB, max_rss_bytes=GIB // 2))
    assert (result.kind, result.cause) == ("job-memory-limit", None)
    assert result.holders == (("largest task (MaxRSS)", GIB / 2),)
    assert any("MaxRSS" in doubt for doubt in result.doubts)
    assert 0 < result.confidence < 1


def test_failure_before_cancellation_is_the_cause() -> None:
    canceled = "slurmstepd: error: *** JOB 7 ON c1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    assert triage_text(TORCH + canceled, "CANCELLED").kind == "gpu-out-of-memory"
    assert triage_text(NCCL + canceled, "CANCELLED").kind == "canceled"


def test_failure_that_hung_until_the_time_limit_is_the_cause() -> None:
    assert triage_text(TORCH, "TIMEOUT").kind == "gpu-out-of-memory"
    assert triage_text("", "TIMEOUT").kind == "time-limit"


def test_handled_failure_of_a_completed_job_is_not_a_cause() -> None:
    result = triage_text(TORCH, "COMPLETED", exit_code=0)
    assert result.kind is None
    assert result.doubts
    assert result.failures


def test_engine_that_died_below_a_wrapper_is_found() -> None:
    """The batch script ends with 0 after its engine has died, or a step of it failed."""
    result = triage_text(TORCH + DEAD, "COMPLETED", exit_code=0)
    assert (result.kind, result.memory) == ("gpu-out-of-memory", "gpu")
    assert any("status 0" in doubt for doubt in result.doubts)
    step = triage([log(TORCH)], JobOutcome(7, "COMPLETED", exit_code=0, steps=(("0", "FAILED"),)))
    assert step.kind == "gpu-out-of-memory"
    canceled = triage([log(TORCH)], JobOutcome(7, "COMPLETED", exit_code=0, steps=(("0", "CANCELLED"),)))
    assert canceled.kind is None


def test_failure_of_a_running_job_is_doubtful() -> None:
    result = triage_text(TORCH, "RUNNING")
    assert result.kind == "gpu-out-of-memory"
    assert any("not ended" in doubt for doubt in result.doubts)
    assert result.confidence < triage_text(TORCH, "FAILED").confidence


def test_failures_of_other_jobs_in_a_log_of_slurmd_are_ignored() -> None:
    other = OOM_KILL.replace("StepId=7", "StepId=8")
    assert triage_text(other, "FAILED").kind is None
    assert triage_text(other + TORCH, "FAILED").kind == "gpu-out-of-memory"
    assert triage_text(other).kind == "job-memory-limit"


def test_holder_is_named_by_another_message_about_the_same_memory() -> None:
    """Slurm's message has no figures, but the kernel's has."""
    kernel = (
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:2097152kB, file-rss:0kB\n"
    )
    result = triage_text(OOM_KILL + kernel, "OUT_OF_MEMORY", memory_bytes=3 * GIB)
    assert result.holders == (("python, PID 4711", 2 * GIB),)
    assert triage_text(OOM_KILL, "OUT_OF_MEMORY", max_rss_bytes=GIB).holders == (("largest task (MaxRSS)", GIB),)


def test_memory_of_a_job_over_its_limit_is_that_of_the_job() -> None:
    result = triage_text("slurmstepd: error: Job 7 exceeded memory limit (4194304 > 2097152), being killed\n")
    assert (result.holders, result.total) == ((("the job", 4 * GIB),), 2 * GIB)


def test_shutdown_explains_the_end_of_the_engine() -> None:
    shutdown = "[launcher.py:1] [shutdown] API server: shutdown triggered\n"
    assert triage_text(shutdown + DEAD).kind == "shutdown"
    assert triage_text(DEAD + shutdown).kind == "engine-ended"
    assert triage_text(shutdown + TORCH).kind == "gpu-out-of-memory"


def test_full_cache_names_tokens() -> None:
    text = "Decode out of memory. Try to lower your batch size.\nTry to allocate 48 tokens.\nAvailable tokens: 3\n"
    result = triage_text(text)
    assert (result.kind, result.memory) == ("kv-cache-exhausted", "kv-cache")
    assert "48 tokens requested, 3 free" in result.summary
    assert any("--max-running-requests" in item for item in result.advice)


def test_more_free_memory_than_requested_is_doubtful() -> None:
    allowed = TORCH.replace("1.00 GiB is free", "30.00 GiB is free")
    assert any("limit" in doubt for doubt in triage_text(allowed).doubts)
    assert not triage_text(TORCH).doubts


def test_share_that_is_free_is_named() -> None:
    text = (
        "ValueError: Free memory on device (20.0/80.0 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 72.0 GiB).\n"
    )
    assert any("0.25" in item for item in triage_text(text).advice)
    full = triage_text(text.replace("20.0/80.0", "0.4/80.0")).advice
    assert not any("below" in item for item in full)
    assert any("another GPU" in item for item in full)


def test_advice_distinguishes_raise_from_lower() -> None:
    torch = " ".join(triage_text(TORCH).advice)
    assert "lower --gpu-memory-utilization" in torch
    assert "raising the share makes this worse" in torch
    blocks = " ".join(triage_text("ValueError: No available memory for the cache blocks.\n").advice)
    assert "raise --gpu-memory-utilization" in blocks


def test_fragmentation_is_named() -> None:
    text = (
        TORCH.strip()
        + " Of the allocated memory 40.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    assert any("expandable_segments" in item for item in triage_text(text).advice)
    assert not any("expandable_segments" in item for item in triage_text(TORCH).advice)


def test_nothing_found_is_not_a_cause() -> None:
    result = triage_text("all is well\n")
    assert (result.kind, result.memory, result.confidence) == (None, None, 0.0)
    assert triage_text("", "FAILED", exit_code=3).summary == "the job ended with status 3, and its logs name no failure"


def test_retractions_alone_are_not_a_failure() -> None:
    assert triage_text("KV cache pool is full. Retract requests. #retracted_reqs: 4\n").kind is None


def test_result_as_json() -> None:
    row = json.loads(json.dumps(triage_text(TORCH, "FAILED", exit_code=1).as_json()))
    assert row["kind"] == "gpu-out-of-memory"
    assert row["holders"][0] == {"process": "this process", "bytes": 48 * GIB}
    assert row["logs"] == [{"log": "job.out", "bytes": len(TORCH)}]
    assert row["job"]["state"] == "FAILED"


def test_startup_figures_of_several_engines_are_unknown() -> None:
    """Two logs with different figures: neither is taken for that of the engine that failed."""
    first, other = (
        log(f"(EngineCore pid=1) INFO GPU KV cache size: {tokens} tokens\n") for tokens in ("1,000", "2,000")
    )
    assert first.startup.kv_tokens == 1000
    assert triage([first]).startup.kv_tokens == triage([first, first]).startup.kv_tokens == 1000
    assert triage([first, other]).startup.kv_tokens is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_failure_has_a_summary(kind: str) -> None:
    """With all figures and with none. The sizes are synthetic."""
    bare = LogFailure(kind, "job.out", 1, "text")
    full = replace(
        bare, process="EngineCore", pid=4, requested=2.0 * GIB, free=1.0 * GIB, total=80.0 * GIB, used=48.0 * GIB,
        unused=3.0 * GIB, holders=((9, 20.0 * GIB), (10, 11.0 * GIB)), max_length=4096, requested_tokens=9000,
        free_tokens=100,
    )  # fmt: skip
    for failure in (bare, full):
        for state in ("FAILED", "COMPLETED", "CANCELLED", None):
            job = JobOutcome(7, state, memory_bytes=32 * GIB, max_rss_bytes=GIB, steps=(("7.0", "FAILED"),))
            result = triage([replace(log(""), failures=(failure,))], job)
            texts = (result.summary, *result.advice, *result.doubts)
            assert all(texts)
            assert not any("{" in text or "None" in text for text in texts)
