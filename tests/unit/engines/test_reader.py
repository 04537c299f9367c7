"""Engine metrics are read from text of any engine and release; damage is reported and loses nothing else."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.engines import metric_table, samples
from slurm_affinode.engines.schema import COUNTERS, METRICS
from slurm_affinode.metrics.readers.common import ReadingNotes

Read = Callable[..., tuple[pl.DataFrame, ReadingNotes]]
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
MS = int(NOON.timestamp() * 1000)


def values(frame: pl.DataFrame, *names: str) -> list[tuple[object, ...]]:
    return frame.select(*names).rows()


# -- recordings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "failed", "figures"),
    [
        ("vllm-0.32-cpu-episode-short-prompts", 213, 0,
         {"kv_usage": 1.0, "waiting": 312, "running": 9, "preemptions": 1881, "kv_tokens": 1280, "block_size": 32,
          "scrape_s": 4.815}),
        ("vllm-0.32-cpu-api-server-killed", 51, 34, {"waiting": 11, "kv_tokens": 8192, "preemptions": 0}),
        ("vllm-0.32-cpu-engine-died", 209, 174, {"kv_tokens": 8192, "preemptions": 0}),
        ("llamacpp-episode", 123, 1, {"waiting": 459, "running": 4}),
    ],
)  # fmt: skip
def test_recordings_have_the_documented_figures(
    read: Read, recordings: Path, *, name: str, rows: int, failed: int, figures: dict[str, float]
) -> None:
    result, notes = read(recordings / f"{name}.prom.gz")
    assert len(result) == rows
    assert result["error"].is_not_null().sum() == failed
    assert {field: result[field].max() for field in figures} == figures
    assert result.select("engine", "address").unique().rows() == [(name.partition("-")[0], name)]
    assert notes.problem_count == 0


def test_llamacpp_has_no_kv_usage_and_no_preemptions(read: Read, recordings: Path) -> None:
    """A metric that an engine does not export is unknown, never 0."""
    result, _ = read(recordings / "llamacpp-episode.prom.gz")
    assert result.select(pl.col("kv_usage", "preemptions", "asleep", "finished").count()).row(0) == (0, 0, 0, 0)


def test_killed_server_keeps_its_identity_in_failed_scrapes(read: Read, recordings: Path) -> None:
    result, _ = read(recordings / "vllm-0.32-cpu-api-server-killed.prom.gz")
    last = result.row(-1, named=True)
    assert (last["model"], last["rank"], last["running"], last["rss_bytes"]) == ("tiny", "0", None, None)
    assert "Connection refused" in last["error"]
    assert 0.9 < result["kv_usage"].max() < 0.92


def test_scrape_with_buckets_of_prompt_lengths(read: Read, recordings: Path) -> None:
    result, _ = read(recordings / "vllm-0.32-cpu-saturated.prom", start=NOON)
    buckets = result["prompt_lengths"][0].to_list()
    assert [(bucket["le"], bucket["count"]) for bucket in buckets][-4:] == [
        (100, 23),
        (200, 23),
        (500, 23),
        (float("inf"), 23),
    ]
    assert values(result, "asleep", "cached_tokens", "failed", "memory_share") == [(False, 1472, 0, 0.92)]


# -- engines and releases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm_kv_cache_usage_perc"])
def test_both_names_of_vllm_kv_usage(read: Read, name: str) -> None:
    result, _ = read(f'{name}{{model_name="m"}} 0.5 {MS}\n')
    assert values(result, "engine", "model", "kv_usage") == [("vllm", "m", 0.5)]


def test_first_name_of_the_table_wins(read: Read) -> None:
    text = f"vllm:gpu_cache_usage_perc 0.4 {MS}\nvllm:kv_cache_usage_perc 0.5 {MS}\n"
    assert values(read(text)[0], "kv_usage") == [(0.5,)]


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_sglang_with_both_prefixes_and_repeated_ranks(read: Read, prefix: str) -> None:
    """Schedulers of tensor parallel ranks repeat their values, so that these are not added."""
    text = (
        "".join(
            f'{prefix}num_running_reqs{{model_name="m",tp_rank="{rank}"}} 5 {MS}\n'
            f'{prefix}num_retracted_requests_total{{model_name="m",tp_rank="{rank}"}} 7 {MS}\n'
            for rank in (0, 1)
        )
        + f'{prefix}token_usage{{model_name="m",tp_rank="0"}} 0.25 {MS}\n'
        f'{prefix}cached_tokens_total{{model_name="m"}} 9 {MS}\n'
    )
    assert values(read(text)[0], "running", "preemptions", "kv_usage", "cached_tokens") == [(5, 7, 0.25, 9)]


def test_tgi(read: Read) -> None:
    failures = {"overloaded": 4, "generation": 1, "validation": 1}
    text = f"tgi_queue_size 3 {MS}\ntgi_batch_current_size 2 {MS}\n"
    text += "".join(f'tgi_request_failure{{err="{why}"}} {count} {MS}\n' for why, count in failures.items())
    result, _ = read(text)
    assert values(result, "engine", "waiting", "running", "rejected", "failed", "kv_usage") == [
        ("tgi", 3, 2, 4, 2, None)
    ]


def test_triton_computes_kv_usage_from_blocks(read: Read) -> None:
    """Older releases have no fraction. Models that are no language models are no engines."""
    blocks = {"used": 30, "max": 120, "tokens_per": 64}
    text = "".join(
        f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}",model="llm",version="1"}} {count} {MS}\n'
        for kind, count in blocks.items()
    )
    text += f'nv_trt_llm_request_metrics{{model="llm",request_type="waiting",version="1"}} 8 {MS}\n'
    for model in ("llm", "resnet"):
        text += f'nv_inference_request_success{{model="{model}",version="1"}} 10 {MS}\n'
        text += f'nv_inference_request_duration_us{{model="{model}",version="1"}} 2500000 {MS}\n'
    result, _ = read(text)
    assert values(result, "model", "kv_usage", "kv_tokens", "waiting", "finished", "e2e_s") == [
        ("llm", 0.25, 7680, 8, 10, 2.5)
    ]


def test_sleeping_engine(read: Read) -> None:
    states = {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    text = "".join(f'vllm:engine_sleep_state{{sleep_state="{item}"}} {on} {MS}\n' for item, on in states.items())
    assert values(read(text)[0], "asleep") == [(True,)]


def test_counters_are_read_with_and_without_total(read: Read) -> None:
    text = f"vllm:num_preemptions 3 {MS}\nllamacpp:prompt_tokens 5 {MS}\n"
    result = read(text)[0].sort("engine")
    assert values(result, "engine", "prompt_tokens", "preemptions") == [("llamacpp", 5, None), ("vllm", None, 3)]


def test_table_reads_every_column(options: object) -> None:
    """The table names columns of the schema only, and only errors of scrapes have no source."""
    read_from = {source.field for source in metric_table.load().sources}
    assert read_from - set(metric_table.HELPERS) <= set(METRICS)
    assert set(METRICS) - read_from == {"error", *metric_table.ORPHANED}
    assert not COUNTERS - read_from


# -- several engines behind one address -----------------------------------------------------------------------------


def test_ranks_and_models_behind_one_port_are_separate(read: Read) -> None:
    """Configuration and process are those of each; a counter without a rank belongs to none of them."""
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank + 1} {MS}\n'
        f'vllm:cache_config_info{{engine="{rank}",block_size="{16 * (rank + 1)}"}} 1 {MS}\n'
        for rank in (0, 1)
    )
    text += f'vllm:admission_rejections_total{{model_name="m",reason="a"}} 6 {MS}\nprocess_open_fds 40 {MS}\n'
    result, _ = read(text)
    assert values(result, "rank", "running", "block_size", "open_files", "rejected") == [
        (None, None, None, None, 6), ("0", 1, 16, 40, None), ("1", 2, 32, 40, None),
    ]  # fmt: skip


def test_counter_without_rank_belongs_to_the_only_engine(read: Read) -> None:
    text = f'vllm:num_requests_running{{engine="0",model_name="m"}} 1 {MS}\n' \
           f'vllm:admission_rejections_total{{model_name="m",reason="a"}} 6 {MS}\n'  # fmt: skip
    assert values(read(text)[0], "rank", "running", "rejected") == [("0", 1, 6)]


def test_engine_restarted_with_another_model(read: Read) -> None:
    text = f'vllm:num_requests_running{{model_name="a"}} 1 {MS}\nvllm:cache_config_info{{block_size="16"}} 1 {MS}\n' \
           f'vllm:num_requests_running{{model_name="b"}} 1 {MS + 9}\n' \
           f'vllm:cache_config_info{{block_size="32"}} 1 {MS + 9}\n'  # fmt: skip
    assert values(read(text)[0], "model", "block_size") == [("a", 16), ("b", 32)]


def test_engines_of_several_addresses(read: Read) -> None:
    """As federated by Prometheus; the process is that of its own address."""
    text = "".join(
        f'vllm:num_requests_running{{instance="gpu0{n}:8000",model_name="m",hpc_job="7"}} {n} {MS}\n'
        f'process_open_fds{{instance="gpu0{n}:8000",hpc_job="7"}} {n}0 {MS}\n'
        for n in (1, 2)
    )
    result = read(text)[0].sort("node")
    assert values(result, "node", "address", "running", "open_files", "job") == [
        ("gpu01", "gpu01:8000", 1, 10, "7"), ("gpu02", "gpu02:8000", 2, 20, "7"),
    ]  # fmt: skip


# -- bad input ------------------------------------------------------------------------------------------------------


def test_scrape_cut_in_the_middle_of_a_line(read: Read) -> None:
    """The cut line is reported with its number and not used: 1 could be the beginning of 12."""
    result, notes = read(f"vllm:num_requests_running 3 {MS}\nvllm:num_requests_waiting 1")
    assert values(result, "running", "waiting") == [(3, None)]
    assert [(problem.line, problem.reason.split(":")[0]) for problem in notes.problems] == [
        (2, "is cut off in its last line; the lines before are read")
    ]


def test_openmetrics_without_its_end(read: Read) -> None:
    text = f"# UNIT x y\nvllm:num_requests_running 3 {MS / 1000}\n"
    result, notes = read(text)
    assert values(result, "running") == [(3,)]
    assert "# EOF" in notes.problems[0].reason


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_readable_part_of_a_truncated_compressed_file_is_kept(read: Read, tmp_path: Path, kind: str) -> None:
    """The lines that can be decompressed, also in a file smaller than a block of the reader."""
    numbers = np.random.default_rng(1).integers(0, 1_000_000, 40_000).tolist()
    text = "".join(f"vllm:num_requests_running {number} {MS + n}\n" for n, number in enumerate(numbers)).encode()
    pack = {
        "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress,
        "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    }[kind]  # fmt: skip
    whole = pack(text)
    path = tmp_path / "a.prom.packed"
    path.write_bytes(whole[: len(whole) * 9 // 10])
    result, notes = read(path)
    assert len(result) > (18_000 if kind == "bzip2" else 30_000)  # bzip2 has blocks of 900 kB
    assert result["running"].to_list() == numbers[: len(result)]
    assert "cut off or damaged" in notes.problems[-1].reason


def test_bad_lines_are_reported_and_skipped(read: Read) -> None:
    running = "vllm:num_requests_running"
    text = f"{running} x {MS}\n!!\n{running}{{a=b}} 1 {MS}\n{running} 4 {MS}\n"
    result, notes = read(text, format="prometheus")
    assert values(result, "running") == [(4,)]
    assert sorted(problem.line or 0 for problem in notes.problems) == [1, 2, 3]


def test_strict_reading_stops_at_the_first_bad_line(read: Read) -> None:
    with pytest.raises(InputError, match="not a number"):
        read(f"vllm:num_requests_running x {MS}\n", strict=True, format="prometheus")


def test_not_a_number_infinite_and_negative_values_are_unknown(read: Read) -> None:
    text = (
        f"vllm:num_requests_running NaN {MS}\nvllm:num_requests_waiting +Inf {MS}\nvllm:kv_cache_usage_perc -1 {MS}\n"
    )
    assert values(read(text)[0], "running", "waiting", "kv_usage") == [(None, None, None)]


def test_impossible_share_is_unknown_and_noted(read: Read) -> None:
    result, notes = read(f"vllm:kv_cache_usage_perc 37 {MS}\n")
    assert values(result, "kv_usage") == [(None,)]
    assert any("kv_usage above 1" in decision for decision in notes.decisions)


def test_restarting_counters_are_kept_and_noted(read: Read) -> None:
    text = "".join(f"vllm:generation_tokens_total {value} {MS + n}\n" for n, value in enumerate((5, 9, 2, 3)))
    result, notes = read(text)
    assert result["generation_tokens"].to_list() == [5, 9, 2, 3]
    assert [count for what, count in notes.decisions.items() if "decreased" in what] == [1]


def test_clock_set_back_and_samples_of_the_future_are_noted(read: Read) -> None:
    future = int((datetime.now(UTC) + timedelta(hours=1)).timestamp() * 1000)
    times = (MS + 1000, MS, future)
    text = "".join(f"# scrape {at} took 0.1s\nvllm:num_requests_running 1 {at}\n" for at in times)
    result, notes = read(text)
    assert len(result) == 3
    assert sorted(notes.decisions.values()) == [1, 1]


def test_clock_set_back_is_noted_without_recorded_scrapes(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Also between two blocks of the file; where scrapes meet earlier ones, the values that do not count are noted."""
    monkeypatch.setattr("slurm_affinode.engines.reader.CHUNK", 512)
    name = "vllm:num_requests_running"
    text = "".join(f"{name} {n} {MS + 15000 * (n if n < 40 else n - 10)}\n" for n in range(80))
    result, notes = read(text)
    assert (len(result), result["running"].max()) == (70, 79)
    assert notes.decisions == {
        "scrapes are earlier than the one before: the clock was set back": 1,
        "values of a series at the same time differ: the last one counts": 10,
    }
    by_series = "".join(
        f"vllm:num_requests_{name} 1 {MS + 15000 * n}\n" for name in ("running", "waiting") for n in range(40)
    )
    assert read(by_series)[1].decisions == {}


def test_series_twice_in_one_scrape_count_once(read: Read) -> None:
    text = f"tgi_queue_size 3 {MS}\ntgi_queue_size 4 {MS}\n"
    assert values(read(text)[0], "waiting") == [(4,)]


def test_labels_of_a_hundred_thousand_series_are_bounded(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(samples, "MOST_SERIES", 1000)
    text = f"vllm:num_preemptions_total 2 {MS}\n" + "".join(
        f'vllm:request_success_total{{finished_reason="{n}"}} 1 {MS}\n' for n in range(100_000)
    )
    result, notes = read(text)
    assert values(result, "preemptions", "finished") == [(2, 999)]
    assert notes.problem_count == 99_001
    assert len(notes.problems) == 100


def test_oversized_model_name_is_rejected(read: Read) -> None:
    result, notes = read(f'vllm:num_requests_running{{model_name="{"x" * 5000}"}} 1 {MS}\n')
    assert result.is_empty()
    assert "at most 1,024 fit" in notes.problems[0].reason


def test_failed_scrapes_before_the_engine_is_known(read: Read) -> None:
    text = (
        f"# scrape {MS} failed after 1.0s: refused\n# scrape {MS + 9} took 0.5s\nvllm:num_requests_running 1 {MS + 9}\n"
    )
    result, _ = read(text)
    assert values(result, "error", "scrape_s", "running") == [("refused", 1.0, None), (None, 0.5, 1)]


def test_failed_scrapes_of_an_unknown_engine_are_reported(read: Read) -> None:
    result, notes = read(f"# scrape {MS} failed after 1.0s: refused\n", format="prometheus")
    assert result.is_empty()
    assert "no scrape identifies the engine" in notes.problems[0].reason


def test_text_without_times_needs_a_start(read: Read) -> None:
    text = "vllm:num_requests_running 1\nvllm:num_requests_running 2\n"
    with pytest.raises(InputError, match="no timestamp"):
        read(text)
    result, _ = read(text, start=NOON, interval_s=15)
    assert values(result, "time", "running") == [(NOON, 1), (NOON + timedelta(seconds=15), 2)]


def test_small_memory_gives_the_same_samples(
    read: Read, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path = recordings / "vllm-0.32-cpu-api-server-killed.prom.gz"
    whole, _ = read(path)
    monkeypatch.setattr(samples.SampleBuilder.__init__, "__kwdefaults__", {"entries_at_once": 500})
    monkeypatch.setattr("slurm_affinode.engines.reader.CHUNK", 8192)
    assert read(path)[0].equals(whole)


def test_own_exporter_is_read_back(read: Read) -> None:
    labels = (
        'engine="vllm",model="m",rank="1",address="127.0.0.1:8000",Hostname="gpu01",hpc_job="7",user="ada",gpus="GPU-1"'
    )
    prefix = "slurm_affinode_serving_"
    text = f"{prefix}kv_usage{{{labels}}} 0.5 {MS}\n{prefix}preemptions_total{{{labels}}} 3 {MS}\n"
    names = ("engine", "model", "rank", "address", "node", "job", "user", "gpus", "kv_usage", "preemptions")
    assert values(read(text)[0], *names) == [("vllm", "m", "1", "127.0.0.1:8000", "gpu01", "7", "ada", "GPU-1", 0.5, 3)]


def test_buckets_of_own_exporter_are_read_back(read: Read) -> None:
    labels = 'engine="vllm",model="m",address="127.0.0.1:8000",Hostname="gpu01",hpc_job="7"'
    text = "".join(
        f'slurm_affinode_serving_generation_lengths_bucket{{{labels},le="{bound}"}} {count} {MS}\n'
        for bound, count in (("100.0", 3), ("+Inf", 4))
    )
    text += f"slurm_affinode_serving_running{{{labels}}} 1 {MS}\n"
    (buckets,) = read(text)[0]["generation_lengths"].to_list()
    assert buckets == [{"le": 100.0, "count": 3.0}, {"le": float("inf"), "count": 4.0}]


def test_scrape_that_failed_for_the_exporter_is_a_failed_sample(read: Read) -> None:
    """An engine that ended has no series; one that is late has ``up`` 0 and its process still listens."""
    labels = 'engine="vllm",model="m",address="127.0.0.1:8000",Hostname="gpu01",hpc_job="7"'
    prefix = "slurm_affinode_serving_"
    text = "".join(
        f"{prefix}{name}{{{labels}}} {value} {at}\n"
        for at, result in (
            (MS, {"up": 1, "running": 2, "scrape_s": 0.5}),
            (MS + 15000, {"up": 0, "scrape_s": 3}),
            (MS + 30000, {"up": 1, "running": 4, "scrape_s": 2.5}),
        )
        for name, value in result.items()
    )
    outcome, notes = read(text)
    assert values(outcome, "job", "running", "scrape_s", "error") == [
        ("7", 2, 0.5, None),
        ("7", None, 3, samples.NO_RESPONSE),
        ("7", 4, 2.5, None),
    ]
    assert (notes.problem_count, dict(notes.unknown)) == (0, {})
