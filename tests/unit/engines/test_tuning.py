"""Advice on settings: raise or lower the memory share, batch, lengths, replicas, and what stays unknown."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from server_samples import engine

from slurm_affinode.engines.crashes.crash_log import LogFailure, scan
from slurm_affinode.engines.diagnosis.examination import examine
from slurm_affinode.engines.diagnosis.series import EngineSeries, streams
from slurm_affinode.engines.schema import IDENTITY
from slurm_affinode.engines.tuning import Recommendation, Tuning, TuningFacts, observe, tune
from slurm_affinode.model.serving import EngineKey
from slurm_affinode.traces.engine_model import EngineModel, simulate

from . import serving_recordings as recordings

GIB = 2**30
BUSY = TuningFacts(
    engine="vllm", seconds=3600.0, requests=1000.0, kv_tokens=100_000.0, kv_peak=1.0, kv_when_waiting=0.95,
    memory_share=0.8, max_running=256.0, running_peak=200.0, waiting_peak=50.0, preemptions=2000.0, prompt_mean=500.0,
    output_mean=400.0, kv_limited=True, gpu_total_gib=80.0, gpu_free_gib=12.0,
)  # fmt: skip


def advice(tuning: Tuning, setting: str) -> Recommendation:
    (recommendation,) = [item for item in tuning.recommendations if item.setting == setting]
    return recommendation


def settings(tuning: Tuning) -> list[str]:
    return [recommendation.setting for recommendation in tuning.recommendations]


def out_of_memory(requested_gib: float = 4.0, free_gib: float = 1.0) -> LogFailure:
    return LogFailure(
        "gpu-out-of-memory", "job.out", 1, "CUDA out of memory", requested=requested_gib * GIB, free=free_gib * GIB,
        total=80.0 * GIB,
    )  # fmt: skip


def test_preemptions_with_free_memory_raise_the_share() -> None:
    item = advice(tune(BUSY), "memory-share")
    assert (item.direction, item.option, item.current) == ("raise", "--gpu-memory-utilization", 0.8)
    assert item.proposed == pytest.approx(0.92)  # 12 of 80 GiB free, 3 % stay free
    assert "2,000 preemptions" in item.reason
    assert "12.0 of 80.0 GiB" in item.reason


def test_out_of_memory_lowers_the_share_despite_preemptions() -> None:
    """The trap: the same preemptions, and the driver ran out of memory."""
    tuning = tune(replace(BUSY, failures=(out_of_memory(),)))
    item = advice(tuning, "memory-share")
    assert item.direction == "lower"
    assert item.proposed == pytest.approx(0.73)  # 3 GiB short of 80, and 3 % more
    assert "4 GiB requested, 1 GiB free" in item.reason


def test_without_free_memory_another_dtype_is_advised_and_the_share_kept() -> None:
    tuning = tune(replace(BUSY, gpu_free_gib=2.0))
    assert "memory-share" not in settings(tuning)
    assert advice(tuning, "kv-dtype").proposed == "fp8"


def test_unknown_gpu_memory_is_reported_and_gives_no_share() -> None:
    tuning = tune(replace(BUSY, gpu_free_gib=None, gpu_total_gib=None))
    assert "memory-share" not in settings(tuning)
    assert "kv-dtype" not in settings(tuning)
    assert any("GPU memory" in item for item in tuning.unknown)


def test_batch_is_lowered_to_the_capacity_of_the_cache() -> None:
    item = advice(tune(replace(BUSY, lost_share=0.3)), "max-running")
    assert (item.direction, item.option) == ("lower", "--max-num-seqs")
    assert item.proposed == int(100_000 // (500 + 200.5))
    assert "cost 30 % of the output rate" in item.reason


@pytest.mark.parametrize("change", [{"preemptions": 100.0, "lost_share": 0.3}, {"lost_share": 0.1}])
def test_cheap_preemptions_do_not_lower_the_batch(change: dict[str, float]) -> None:
    """They are few, or cost little of the output rate: fewer requests at a time would cost as much."""
    tuning = tune(replace(BUSY, **change))
    assert "max-running" not in settings(tuning)
    assert not [text for text in tuning.unknown if "output rate" in text]


def test_preemptions_of_unknown_cost_do_not_lower_the_batch() -> None:
    """On a real engine, preemptions halved with the batch, and the queue doubled (benchmarks/README.md)."""
    tuning = tune(BUSY)
    assert "max-running" not in settings(tuning)
    assert any("output rate without preemptions" in text for text in tuning.unknown)


def test_option_that_keeps_the_cache_small_is_raised() -> None:
    """The memory for more blocks is there: neither another share nor another dtype nor a smaller batch is advised."""
    tuning = tune(replace(BUSY, lost_share=0.3, gpu_free_gib=1.0, kv_blocks=96, kv_blocks_free=32_768))
    item = advice(tuning, "kv-blocks")
    assert (item.direction, item.option, item.current, item.proposed) == (
        "raise",
        "--num-gpu-blocks-override",
        96,
        32_768,
    )
    assert "memory for 32,768 blocks" in item.reason
    assert settings(tuning) == ["kv-blocks"]
    assert tuning.options == ("--num-gpu-blocks-override", "32768")


@pytest.mark.parametrize("change", [{"kv_blocks_free": 96}, {"kv_limited": False}, {"kv_blocks": None}])
def test_option_that_does_not_limit_is_left(change: dict[str, int | bool | None]) -> None:
    facts = replace(BUSY, kv_blocks=96, kv_blocks_free=32_768)
    assert "kv-blocks" not in settings(tune(replace(facts, **change)))


def test_full_batch_with_free_cache_is_raised() -> None:
    facts = replace(
        BUSY, kv_limited=False, batch_limited=True, preemptions=0.0, max_running=16.0, running_peak=16.0,
        kv_when_waiting=0.2,
    )  # fmt: skip
    item = advice(tune(facts), "max-running")
    assert (item.direction, item.proposed) == ("raise", 64)


def test_batch_is_raised_while_the_cache_is_empty() -> None:
    """Requests waited before the first one got a block: a KV usage of 0 is known."""
    facts = replace(BUSY, kv_limited=False, batch_limited=True, preemptions=0.0, max_running=16.0, kv_when_waiting=0.0)
    assert advice(tune(facts), "max-running").direction == "raise"


@pytest.mark.parametrize("change", [{"requests": None}, {"preemptions": None}])
def test_preemptions_per_unknown_request_do_not_lower_the_batch(change: dict[str, float | None]) -> None:
    tuning = tune(replace(BUSY, lost_share=0.3, **change))
    assert "max-running" not in settings(tuning)


def test_responses_without_tokens_are_accepted() -> None:
    """Embeddings: a request holds its prompt only."""
    item = advice(tune(replace(BUSY, lost_share=0.3, prompt_mean=1000.0, output_mean=0.0)), "max-running")
    assert item.proposed == 100


def test_dtype_is_not_advised_while_free_memory_is_unknown() -> None:
    """A KV cache that was too small at startup does not tell whether GPU memory is free."""
    small = LogFailure("kv-cache-too-small", "job.out", 1, "To serve at least one", max_length=176)
    facts = replace(BUSY, gpu_free_gib=None, gpu_total_gib=None, failures=(small,))
    assert "kv-dtype" not in settings(tune(facts))
    assert "kv-dtype" in settings(tune(replace(facts, failures=(out_of_memory(),))))


def observed(*lengths: list[dict[str, float]]) -> TuningFacts:
    """Return the facts of an engine that was started again with each histogram of prompts and answers."""
    rows = [
        {"running": 1.0, "start_time": 100.0 * place, "prompt_lengths": counts, "generation_lengths": counts}
        for place, counts in enumerate(lengths)
    ]
    samples = engine("a:1", rows)
    return observe(EngineSeries(EngineKey(*samples.select(*IDENTITY).row(0)), samples), ())


def test_longest_request_is_that_of_all_processes_of_the_engine() -> None:
    """Histograms start again with the process: the one before a restart had the long prompts."""
    long = [{"le": 100.0, "count": 5.0}, {"le": 8000.0, "count": 9.0}, {"le": float("inf"), "count": 9.0}]
    short = [{"le": 100.0, "count": 3.0}, {"le": 8000.0, "count": 3.0}, {"le": float("inf"), "count": 3.0}]
    facts = observed(long, short)
    assert (facts.prompt_longest, facts.output_longest) == (8000.0, 8000.0)
    assert observed(short, short).prompt_longest == 100.0
    beyond = [{"le": 100.0, "count": 3.0}, {"le": float("inf"), "count": 4.0}]
    assert observed(beyond, short).prompt_longest is None, "longer than the last bound"


def test_length_is_lowered_to_the_longest_request() -> None:
    facts = replace(BUSY, max_length=131_072, prompt_longest=4000.0, output_longest=2000.0)
    item = advice(tune(facts), "max-length")
    assert item.proposed == 7680
    assert "longer requests are refused" in item.cost
    assert "max-length" not in settings(tune(replace(facts, max_length=8192)))
    assert "max-length" not in settings(tune(replace(facts, output_longest=None)))


def test_refused_start_gives_the_longest_possible_length() -> None:
    small = LogFailure("kv-cache-too-small", "job.out", 1, "To serve at least one", max_length=176)
    item = advice(tune(TuningFacts(engine="vllm", seconds=0.0, failures=(small,))), "max-length")
    assert (item.direction, item.proposed) == ("lower", 176)


def test_long_length_is_written_with_all_digits() -> None:
    small = LogFailure("kv-cache-too-small", "job.out", 1, "To serve at least one", max_length=1_000_016)
    tuning = tune(TuningFacts(engine="vllm", seconds=0.0, failures=(small,)))
    assert tuning.options == ("--max-model-len", "1000016")


def test_overload_advises_replicas() -> None:
    item = advice(tune(replace(BUSY, overload=2.0)), "replicas")
    assert (item.option, item.proposed) == (None, 3)
    assert "replicas" not in settings(tune(replace(BUSY, overload=0.9)))


def test_overload_of_unknown_size_advises_replicas_without_a_number() -> None:
    """llama.cpp has no counter of requests: the queue grew, by how much too fast is unknown."""
    result = tune(TuningFacts(engine="llamacpp", seconds=120.0, waiting_peak=459.0, unstable=True))
    item = advice(result, "replicas")
    assert (item.direction, item.proposed) == ("raise", None)
    assert "459" in item.reason
    assert "arrivals by service" in result.unknown[-1]


def test_start_refused_for_lack_of_free_memory_lowers_the_share() -> None:
    """Preemptions ask for more memory, but another process holds it."""
    refused = LogFailure("gpu-memory-at-startup", "job.out", 1, "", free=42.5 * GIB, total=80.0 * GIB)
    item = advice(tune(replace(BUSY, failures=(refused,))), "memory-share")
    assert (item.direction, item.proposed) == ("lower", 0.53)
    assert "42.5 GiB of 80 GiB" in item.reason


def test_batch_without_room_in_the_cache_lowers_the_batch() -> None:
    exhausted = LogFailure("kv-cache-exhausted", "job.out", 1, "")
    item = advice(tune(replace(BUSY, engine="sglang", failures=(exhausted,))), "max-running")
    assert (item.direction, item.option, item.proposed) == ("lower", "--max-running-requests", None)


def test_quiet_engine_gets_no_advice() -> None:
    quiet = TuningFacts(engine="vllm", seconds=3600.0, requests=10.0, kv_tokens=1e5, kv_peak=0.1, preemptions=0.0)
    assert tune(quiet) == Tuning(quiet, (), ())


@pytest.mark.parametrize(
    ("engine", "command"),
    [("vllm", "vllm serve 'a b' --gpu-memory-utilization 0.92"), ("sglang", "--mem-fraction-static 0.92"),
     ("tgi", None)],
)  # fmt: skip
def test_command_has_the_options_of_the_engine(engine: str, command: str | None) -> None:
    result = tune(replace(BUSY, engine=engine)).command("a b")
    assert (command or "") in (result or "")
    assert (result is None) == (command is None)


def test_command_keeps_the_options_of_the_start() -> None:
    """The advised option replaces the one of the start."""
    start_options = (
        ("--port", "8001"),
        ("--gpu-memory-utilization", "0.8"),
        ("--enforce-eager",),
        ("--lora", "a", "b c"),
    )
    command = tune(replace(BUSY, model="/models/a", options=start_options)).command("a")
    assert command is not None
    assert command.startswith(
        "vllm serve /models/a --port 8001 --enforce-eager --lora a 'b c' --gpu-memory-utilization "
    )
    assert command.count("--gpu-memory-utilization") == 1


def test_command_without_an_advised_option_is_none() -> None:
    assert tune(TuningFacts(engine="vllm", seconds=60.0, options=(("--port", "1"),))).command("a") is None


@pytest.mark.parametrize(("overload", "agrees"), [(2.0, True), (1.9, True), (5.0, False), (None, False)])
def test_advice_agrees_while_its_values_stay(overload: float | None, agrees: bool) -> None:
    """Reasons have figures that grow; only settings, directions and values count."""
    before, after = replace(BUSY, overload=2.0), replace(BUSY, overload=overload, preemptions=9_999.0)
    assert tune(before).agrees(tune(after)) == agrees


def test_advice_as_json() -> None:
    row = json.loads(json.dumps(tune(BUSY).as_json(), allow_nan=False))
    assert row["recommendations"][0]["setting"] == "memory-share"
    assert row["facts"]["max_length"] is None


def test_advice_for_a_recorded_overload_ends_preemptions_in_the_model(shared_data: Path) -> None:
    """The KV cache that is advised, in the queueing model fitted to the recording, whose batch stays the same."""
    samples = recordings.read(shared_data / "serving", "vllm-0.32-cpu-episode-short-prompts")
    key = EngineKey(*samples.select(*IDENTITY).row(0))
    (examined,) = examine(key, samples)
    (series,) = streams(key, samples)
    log = gzip.decompress((shared_data / "serving/vllm-0.32-cpu-episode-short-prompts.log.gz").read_bytes())
    result = scan(iter([log]), "server.log")
    tuning = tune(observe(series, examined.health.diagnoses, (), result.startup))
    item = advice(tuning, "kv-blocks")
    assert (item.current, item.proposed) == (40, 32_768)
    assert "max-running" not in settings(tuning)
    assert advice(tuning, "replicas").proposed == 3

    text = gzip.decompress((shared_data / "serving/vllm-0.32-cpu-episode-short-prompts.requests.jsonl.gz").read_bytes())
    sent = sorted(
        (row for row in map(json.loads, text.splitlines()) if row.get("status") == 200), key=lambda row: row["start_ms"]
    )
    arrival = np.array([row["start_ms"] for row in sent]) / 1e3
    prompt, answer = np.array([row["prompt"] for row in sent]), np.array([row["tokens"] for row in sent])
    engine = EngineModel(
        kv_tokens=1280, max_running=16, base_s=0.0021, per_request_s=0.0001, per_prefill_token_s=5e-6, block_size=32,
        max_batched_tokens=2048,
    )  # fmt: skip
    before = simulate(arrival - arrival[0], prompt, answer, engine)
    after = simulate(arrival - arrival[0], prompt, answer, replace(engine, kv_tokens=32_768 * 32))
    assert after.preemptions.sum() == 0 < before.preemptions.sum()
    assert after.waiting_max < before.waiting_max
