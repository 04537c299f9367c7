"""Diagnoses of recorded engines, of the recordings as other scrapers would have made them, and of synthetic samples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from serving_simulation import Engine, service_rate, simulate

from slurm_affinode.engines.diagnosis.examination import EngineContext, Fleet, Options, diagnose_all, examine, of_each
from slurm_affinode.engines.diagnosis.queue import second_moment
from slurm_affinode.engines.diagnosis.rules import RULES
from slurm_affinode.engines.diagnosis.series import EngineSeries
from slurm_affinode.engines.samples import NO_RESPONSE, NO_SERVER
from slurm_affinode.engines.schema import COUNTERS, IDENTITY
from slurm_affinode.model.serving import DIAGNOSES, Diagnosis, EngineEvent, EngineHealth, EngineKey

from .. import serving_recordings as recordings

SHORT, LLAMA = "vllm-0.32-cpu-episode-short-prompts", "llamacpp-episode"
KILLED, DIED = "vllm-0.32-cpu-api-server-killed", "vllm-0.32-cpu-engine-died"
KEY = EngineKey("lab", "gpu01", "gpu01:8000", "vllm", "tiny")
BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
LOAD = {"queue-unstable", "recovering", "kv-saturated", "preemption-storm", "batch-full"}


@pytest.fixture(scope="session")
def serving(shared_data: Path) -> Path:
    path = shared_data / "serving"
    if not path.is_dir():
        pytest.skip(f"the recordings of serving engines are not at {path}")
    return path


def health(samples: pl.DataFrame, around: EngineContext | None = None, **options: float) -> EngineHealth:
    (examination,) = examine(KEY, samples, around or EngineContext(), Options(**options))
    return examination.health


def of(health: EngineHealth, kind: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis in health.diagnoses if diagnosis.kind == kind]


def only(health: EngineHealth, kind: str) -> Diagnosis:
    (item,) = of(health, kind)
    return item


def spans(health: EngineHealth, kind: str, begin_ms: int) -> list[tuple[float, float]]:
    return [
        (item.since.timestamp() - begin_ms / 1000, item.until.timestamp() - begin_ms / 1000)
        for item in of(health, kind)
    ]


def every(samples: pl.DataFrame, seconds: int) -> pl.DataFrame:
    """Return the samples that a scraper with this interval would have taken."""
    number = pl.col("time").dt.epoch("ms") // (seconds * 1000)
    return samples.filter(number != number.shift(fill_value=-1))


def synthetic(seconds: int, step_s: int = 15, **columns: object) -> pl.DataFrame:
    """Return samples of an engine. A column is a value, or a function of the time in seconds."""
    at = np.arange(0, seconds, step_s)
    made = {
        name: [key(float(t)) for t in at] if callable(key) else [key] * len(at)
        for name, key in ({"start_time": BEGIN.timestamp() - 100, "scrape_s": 0.01} | columns).items()
    }
    frame = pl.DataFrame(
        {"time": [BEGIN + timedelta(seconds=int(t)) for t in at], **made}, strict=False, infer_schema_length=None
    )
    return recordings.conform(
        frame.with_columns(
            cluster=pl.lit("lab"), node=pl.lit("gpu01"), address=pl.lit("gpu01:8000"), engine=pl.lit("vllm"),
            model=pl.lit("tiny"), job=pl.lit("77"), gpus=pl.lit("GPU-1"),
        )
    )  # fmt: skip


def gpus(seconds: int, **columns: object) -> pl.DataFrame:
    at = np.arange(0, seconds, 30)
    made = {name: [column(float(t)) if callable(column) else column for t in at] for name, column in columns.items()}
    times = [BEGIN + timedelta(seconds=int(t)) for t in at]
    return pl.DataFrame({"uuid": ["GPU-1"] * len(at), "time": times, **made}).cast({"time": pl.Datetime("ms", "UTC")})


# The recordings


def test_phases_of_the_recorded_overload(serving: Path) -> None:
    """0.8 and 2.5 requests/s are healthy, 5 and 7.5 at times saturated, 13 is an overload that then empties."""
    result = health(recordings.read(serving, SHORT))
    phases = recordings.phases(serving, SHORT)
    begin = phases[0][0]
    (first, second) = sorted(spans(result, "healthy", begin))[:: len(spans(result, "healthy", begin)) - 1]
    assert first[0] < 0
    assert first[1] > 65
    assert second[0] < (phases[6][0] - begin) / 1000 + 5
    assert second[1] > 255
    ((since, until),) = spans(result, "queue-unstable", begin)
    assert (phases[4][0] - begin) / 1000 - 5 < since < (phases[4][0] - begin) / 1000 + 10
    assert until <= (phases[5][0] - begin) / 1000
    ((emptying, empty),) = spans(result, "recovering", begin)
    assert emptying == until
    assert (phases[5][0] - begin) / 1000 < empty < (phases[6][0] - begin) / 1000
    for full in spans(result, "kv-saturated", begin):
        assert full[0] > 65
        assert full[1] < 250
    assert not of(result, "idle")
    assert not of(result, "stalled")
    assert not of(result, "ended")


def test_overload_is_estimated_from_tokens(serving: Path) -> None:
    result = health(recordings.read(serving, SHORT))
    figures = dict(only(result, "queue-unstable").figures)
    assert 1.5 < figures["overload"] < 2.2
    assert abs(figures["overload_tokens"] - figures["overload"]) < figures["overload_tokens_error"]
    assert figures["ttft_s"] > 100 * figures["ttft_before_s"]


def test_preemption_storm_without_loss_of_throughput(serving: Path) -> None:
    """Preemptions cost prefill and latency here. Throughput does not fall, and the diagnosis says so."""
    result = health(recordings.read(serving, SHORT))
    storm = max(of(result, "preemption-storm"), key=lambda item: dict(item.figures)["preemptions"])
    figures = dict(storm.figures)
    assert 1000 < figures["preemptions"] <= 1881
    assert 0.1 < figures["recomputed_share"] < 0.5
    assert figures.get("lost_share", 0.0) < 0.2
    assert "throughput" in storm.doubt or "lost_share" not in figures


def test_overload_without_kv_metrics(serving: Path) -> None:
    """llama.cpp exports no KV usage and no preemptions: its queue and its slots show the overload."""
    result = health(recordings.read(serving, LLAMA))
    begin = recordings.phases(serving, LLAMA)[0][0]
    ((since, until),) = spans(result, "queue-unstable", begin)
    assert 15 < since < 35
    assert 47 < until < 53
    ((_, empty),) = spans(result, "recovering", begin)
    assert 75 < empty < 85
    assert dict(of(result, "batch-full")[-1].figures)["batch_limit"] == 4
    assert not of(result, "kv-saturated")
    assert {item.dimension for item in only(result, "queue-unstable").evidence if item.unknown} >= {"arrivals", "ttft"}


def test_cache_is_full_without_preemption_if_requests_are_large(serving: Path) -> None:
    """A request needs a fifth of the cache: four fit, usage is 0.66 to 0.91, and no request is preempted."""
    result = health(recordings.read(serving, KILLED))
    figures = dict(only(result, "kv-saturated").figures)
    assert figures["preemptions"] == 0
    assert 0.15 < figures["demand"] < 0.3
    assert 0.7 < figures["full_level"] < 0.85


@pytest.mark.parametrize("name", [KILLED, DIED])
def test_refused_scrapes_are_an_end(serving: Path, name: str) -> None:
    result = health(recordings.read(serving, name))
    end = only(result, "ended")
    assert end in result.current
    assert end.confidence == 1.0
    assert of(result, "healthy")


def test_late_scrapes_do_not_end_a_process(serving: Path) -> None:
    """A loaded server takes seconds to respond: scrapes that timed out and then succeeded again end nothing."""
    samples = recordings.read(serving, SHORT)
    names = [name for name in samples.columns if name not in (*IDENTITY, "time", "error", "scrape_s")]
    late = pl.arange(pl.len()).is_between(150, 157)
    timed_out = samples.with_columns(
        pl.when(late).then(pl.lit("timed out")).otherwise(pl.col("error")).alias("error"),
        *(pl.when(late).then(None).otherwise(pl.col(name)).alias(name) for name in names),
    )
    result = health(timed_out)
    assert result.failed == 8
    assert not of(result, "ended")
    assert len(of(result, "queue-unstable")) == 1


def test_late_scrape_at_the_end_leaves_an_overload_current(serving: Path) -> None:
    """A loaded server responds late. Whether an idle one still is idle is unknown until it responds."""
    overload = recordings.read(serving, SHORT).filter(pl.col("waiting").cum_max() < 300)
    late = overload.tail(1).select(*IDENTITY, pl.col("time").dt.offset_by("5s"), error=pl.lit("timed out"))
    result = health(pl.concat([overload, recordings.conform(late)], how="diagonal"))
    assert "queue-unstable" in {diagnosis.kind for diagnosis in result.current}
    assert result.responded == overload["time"][-1] < result.until
    quiet = synthetic(3600, 15, running=0.0, waiting=0.0, generation_tokens=5.0)
    late = quiet.tail(1).select(*IDENTITY, pl.col("time").dt.offset_by("15s"), error=pl.lit("timed out"))
    assert not health(pl.concat([quiet, recordings.conform(late)], how="diagonal")).current


@pytest.mark.parametrize(("restarted", "ends"), [(False, 0), (True, 1)])
def test_refused_scrapes_end_a_process_only_if_another_one_follows(restarted: bool, ends: int) -> None:
    down = lambda t: 1800 <= t < 2100  # noqa: E731
    result = health(synthetic(
        3600, running=lambda t: None if down(t) else 1.0, generation_tokens=lambda t: None if down(t) else t,
        error=lambda t: "[Errno 111] Connection refused" if down(t) else None,
        start_time=lambda t: None if down(t) else 100.0 + 50 * (restarted and t >= 2100),
    ))  # fmt: skip
    assert len(of(result, "ended")) == ends


def test_engine_whose_process_still_listens_may_be_hanging() -> None:
    """This project's exporter reports an engine only while one of the job's processes listens at its address."""
    down = lambda t: t >= 2400  # noqa: E731
    samples = synthetic(
        3600, running=lambda t: None if down(t) else 1.0, generation_tokens=lambda t: None if down(t) else t,
        error=lambda t: NO_RESPONSE if down(t) else None,
    )  # fmt: skip
    hung = only(health(samples), "ended")
    timed_out = only(health(samples.with_columns(pl.col("error").str.replace(".+", "timed out"))), "ended")
    assert "still listens" in hung.doubt
    assert hung.confidence < timed_out.confidence


@pytest.mark.parametrize(("name", "seconds"), [(SHORT, 5), (SHORT, 15), (LLAMA, 5)])
def test_overload_at_other_scrape_intervals(serving: Path, name: str, seconds: int) -> None:
    samples = every(recordings.read(serving, name), seconds)
    exact = health(recordings.read(serving, name))
    result = health(samples)
    assert (
        abs((only(result, "queue-unstable").until - only(exact, "queue-unstable").until).total_seconds()) <= 2 * seconds
    )
    assert len(of(result, "recovering")) == 1


def test_overload_after_a_time_with_a_short_queue(serving: Path) -> None:
    """At 7.5 requests/s up to 23 wait: that hides no growth at 13 requests/s, whenever the scrapes are."""
    samples = recordings.read(serving, SHORT)
    phases = [(begin / 1000, end / 1000) for begin, end, _ in recordings.phases(serving, SHORT)]
    for delay_s in (0.0, 1.7, 5.0, 6.7, 8.3):
        number = (pl.col("time").dt.epoch("ms") + round(delay_s * 1000)) // 10_000
        result = health(samples.filter(number != number.shift(fill_value=-1)))
        growth = only(result, "queue-unstable")
        assert phases[2][0] < growth.since.timestamp() < phases[4][0] + 20
        assert phases[4][1] - 30 < growth.until.timestamp() < phases[5][1]


def test_few_scrapes_lower_the_confidence(serving: Path) -> None:
    result = health(every(recordings.read(serving, SHORT), 30))
    for item in of(result, "queue-unstable"):
        assert item.confidence < 0.8
        assert "scrapes" in item.doubt


@pytest.mark.parametrize("seed", range(5))
def test_overload_with_missing_scrapes(serving: Path, seed: int) -> None:
    samples = recordings.read(serving, SHORT)
    kept = np.random.default_rng(seed).random(samples.height) > 0.3
    result = health(samples.filter(pl.Series(kept)))
    assert len(of(result, "queue-unstable")) == 1
    assert not of(result, "ended")


def growing(t: float) -> float:
    """Return a queue that grows by a request per second, in uneven steps."""
    return max(0.0, t - 60 + 3 * np.sin(t))


def test_repeats_of_an_exporter_are_one_scrape() -> None:
    """It scrapes the engine every 5 s, and is scraped every second."""
    values = {"running": 2.0, "waiting": lambda t: round(growing(t)), "scrape_s": lambda t: 0.1004 + t * 1.37e-6}
    direct = synthetic(180, 5, **values)
    repeated = synthetic(180, 1, **{
        name: value if isinstance(value, float) else lambda t, of=value: of(t - t % 5) for name, value in values.items()
    })  # fmt: skip
    result, exact = health(repeated), health(direct)
    assert (result.samples, exact.samples) == (36, 36)
    assert only(result, "queue-unstable").figures == only(exact, "queue-unstable").figures


def test_scrapes_of_the_same_rounded_duration_all_count() -> None:
    assert health(synthetic(300, running=0.0, waiting=0.0, scrape_s=0.012)).samples == 20


def test_overload_is_not_over_with_a_small_dip() -> None:
    """The last scrapes see fewer requests than the longest queue; minutes later it would be over."""
    dip = {170: 100.0, 175: 98.0}
    samples = synthetic(180, 5, running=2.0, waiting=lambda t: dip.get(int(t), growing(t)))
    result = health(samples)
    assert only(result, "queue-unstable") in result.current
    calm = synthetic(480, 5, running=2.0, waiting=lambda t: 100.0 if t >= 170 else growing(t))
    assert only(health(calm), "queue-unstable").until <= BEGIN + timedelta(seconds=200)


def test_square_of_lengths_fits_their_mean() -> None:
    """Of lengths from 150 to 350 tokens, a quarter is in a bucket up to 200, the others in one up to 500."""
    bounds = (100.0, 200.0, 500.0, math.inf)
    histogram = [[{"le": le, "count": c} for le, c in zip(bounds, (0.0, n, 4 * n, 4 * n), strict=True)]
                 for n in (0.0, 25.0)]  # fmt: skip
    samples = synthetic(30, 15, running=1.0, generation_lengths=lambda t: histogram[int(t > 0)])
    value, error = second_moment(EngineSeries(KEY, samples), 0, 1, 250.0)
    exact = 250.0**2 + 200.0**2 / 12
    assert value == pytest.approx(exact, rel=0.1)
    assert abs(value - exact) < error


@pytest.mark.parametrize("bounds", [(math.inf,), (0.0,), (0.0, math.inf)])
def test_square_of_lengths_without_usable_buckets_is_typical(bounds: tuple[float, ...]) -> None:
    histogram = [[{"le": le, "count": count} for le in bounds] for count in (0.0, 25.0)]
    samples = synthetic(30, 15, running=1.0, generation_lengths=lambda t: histogram[int(t > 0)])
    value, error = second_moment(EngineSeries(KEY, samples), 0, 1, 250.0)
    assert 250.0**2 < value < 3 * 250.0**2
    assert error > 0


def test_stripped_metrics_leave_the_queue(serving: Path) -> None:
    """Without KV usage, preemptions, lengths and times, the growth of the queue is still significant."""
    samples = recordings.read(serving, SHORT)
    kept = ("running", "waiting", "finished", "start_time")
    bare = recordings.conform(samples.select(*IDENTITY, "time", "error", *kept))
    result = health(bare)
    full, less = only(health(samples), "queue-unstable"), only(result, "queue-unstable")
    assert less.confidence < full.confidence
    assert "overload_tokens" not in dict(less.figures)
    assert not {"kv-saturated", "preemption-storm"} & {diagnosis.kind for diagnosis in result.diagnoses}


def test_restarted_counters_change_no_rate(serving: Path) -> None:
    samples = recordings.read(serving, SHORT)
    later = pl.arange(pl.len()) >= 60
    counters = ["generation_tokens", "finished", "prompt_tokens", "preemptions", "ttft_s", "ttft_count"]
    restarted = samples.with_columns(
        *(pl.when(later).then(pl.col(name) - pl.col(name).gather(60)).otherwise(pl.col(name)).alias(name)
          for name in counters),
        pl.when(later).then(pl.col("start_time") + 65).otherwise(pl.col("start_time")).alias("start_time"),
    )  # fmt: skip
    result, exact = only(health(restarted), "queue-unstable"), only(health(samples), "queue-unstable")
    assert (result.since, result.until) == (exact.since, exact.until)
    rates = ("arrivals_per_s", "served_per_s", "overload_tokens")
    assert [dict(result.figures)[name] for name in rates] == [dict(exact.figures)[name] for name in rates]


def test_backward_step_of_the_clock(serving: Path) -> None:
    """The scraper's clock is set back by 20 s during the overload: no rate becomes negative, and it is still found."""
    samples = recordings.read(serving, SHORT)
    shifted = samples.with_columns(
        pl.when(pl.arange(pl.len()) >= 150)
        .then(pl.col("time").dt.offset_by("-20s"))
        .otherwise(pl.col("time"))
        .alias("time")
    )
    result = health(shifted)
    assert of(result, "queue-unstable")
    for diagnosis in result.diagnoses:
        assert diagnosis.until >= diagnosis.since
        assert all(value >= 0 for name, value in diagnosis.figures if name.endswith("_per_s"))


def test_two_processes_behind_one_address(serving: Path) -> None:
    """Each process has its own counters, and its own result."""
    samples = recordings.read(serving, SHORT)
    other = samples.with_columns(
        pl.col("time").dt.offset_by("500ms"),
        pl.col("start_time") + 30,
        generation_tokens=pl.col("generation_tokens") / 2,
    )
    healths = [engine.health for engine in examine(KEY, pl.concat([samples, other]))]
    assert len(healths) == 2
    assert len({figure.key.rank for figure in healths}) == 2
    for item in healths:
        assert len(of(item, "queue-unstable")) == 1


@pytest.mark.parametrize("order", [lambda n: n % 2, lambda n: n * n % 5 % 2])
def test_two_processes_without_a_start_time(serving: Path, order: Callable[[int], int]) -> None:
    """Only their counters tell them apart: one is overloaded, the other one is not."""
    loaded = recordings.read(serving, SHORT).with_columns(start_time=pl.lit(None, pl.Float64))
    counters = [name for name in sorted({*COUNTERS} - {"rejected", "preemptions", "cpu_s"}) if name in loaded.columns]
    calm = loaded.with_columns(
        pl.lit(1.0).alias("running"), pl.lit(0.0).alias("waiting"), pl.lit(0.1).alias("kv_usage"),
        *(pl.int_range(pl.len()).cast(pl.Float64).alias(name) for name in counters),
        preemptions=pl.lit(0.0), cpu_s=pl.lit(None, pl.Float64),
    )  # fmt: skip
    turn = pl.Series([order(n) for n in range(loaded.height)])
    healths = [engine.health for engine in examine(KEY, pl.concat([loaded.filter(turn == 1), calm.filter(turn == 0)]))]
    assert [figure.key.rank for figure in healths] == ["process 1", "process 2"]
    overloaded = [item for item in healths if of(item, "queue-unstable")]
    assert len(overloaded) == 1
    (other,) = [item for item in healths if item not in overloaded]
    assert {diagnosis.kind for diagnosis in other.diagnoses} == {"healthy"}


def test_indistinguishable_processes_are_not_healthy() -> None:
    draw = np.random.default_rng(1)
    counts = {t: float(draw.integers(1000)) for t in range(0, 3600, 15)}
    values = dict.fromkeys(("finished", "generation_tokens", "prompt_tokens"), lambda t: counts[int(t)])
    assert not of(health(synthetic(3600, 15, running=1.0, waiting=0.0, start_time=None, **values)), "healthy")


def test_rank_chosen_by_a_user_is_only_a_name(serving: Path) -> None:
    samples = recordings.read(serving, LLAMA).with_columns(rank=pl.lit("started yesterday"))
    (result,) = diagnose_all(samples.lazy())
    assert of(result, "queue-unstable")


# Processes and logs


def left(directory: Path, gpu_memory_mib: float | None) -> list[tuple[datetime, int, float | None]]:
    """Return the times of the recording at which the engine and its worker had no server, as the exporter does."""
    result: list[tuple[datetime, int, float | None]] = []
    names: list[str] = []
    at = datetime.fromtimestamp(0, UTC)
    for line in (*(directory / f"{KILLED}.processes.txt").read_text().splitlines(), "== end"):
        if line.startswith("=="):
            if names and "vllm" not in names:
                result.append((at, sum(name.startswith("VLLM::") for name in names), gpu_memory_mib))
            names = []
            match = re.match(r"== after .*? (\d{13})", line)
            at = datetime.fromtimestamp(int(match[1]) / 1000, UTC) if match else at
        elif (fields := line.split()) and fields[0].isdigit() and len(fields) >= 10 and not fields[4].startswith("Z"):
            names.append(fields[9])
    return result


def with_orphans(samples: pl.DataFrame, rows: list[tuple[datetime, int, float | None]]) -> pl.DataFrame:
    """Add samples of the exporter after the end of the server."""
    last = samples.tail(1).with_columns(pl.lit("77").alias("job"), pl.lit(NO_SERVER).alias("error"))
    return pl.concat([samples, *(
        last.with_columns(
            pl.lit(at).cast(samples["time"].dtype).alias("time"),
            pl.lit(count, pl.Float64).alias("orphaned_processes"),
            pl.lit(held, pl.Float64).alias("orphaned_memory_mib"),
        )
        for at, count, held in rows
    )], how="diagonal")  # fmt: skip


@pytest.mark.parametrize(("memory", "confidence"), [(20480.0, 1.0), (None, 0.7)])
def test_killed_server_leaves_its_engine(serving: Path, memory: float | None, confidence: float) -> None:
    """The recorded processes: the API server is killed, but EngineCore and its worker keep running."""
    rows = left(serving, memory)
    assert [count for _, count, _ in rows] == [2] * 5
    result = health(with_orphans(recordings.read(serving, KILLED), rows))
    orphan = only(result, "orphaned-engine")
    assert (orphan.confidence, orphan.since, orphan.until) == (confidence, rows[0][0], rows[-1][0])
    assert "job 77" in orphan.summary
    assert ("20.0 GiB" in orphan.summary, bool(orphan.doubt)) == (memory is not None, memory is None)


def test_end_of_the_server_is_part_of_the_orphaned_engine() -> None:
    """Without other scrapes there is one diagnosis; a server that responds again ends it."""
    samples = synthetic(600, 15, running=0.0, waiting=0.0, generation_tokens=5.0, finished=1.0)
    times = [BEGIN + timedelta(seconds=615 + 15 * n) for n in range(20)]
    result = health(with_orphans(samples, [(at, 1, 512.0) for at in times]))
    assert [diagnosis.kind for diagnosis in result.current] == ["orphaned-engine"]
    assert not of(result, "ended")
    again = samples.with_columns(pl.col("time").dt.offset_by("30m"))
    later = [(at + timedelta(hours=1), 1, 512.0) for at in times]
    rows = [(at, 1, 512.0) for at in times]
    twice = with_orphans(pl.concat([with_orphans(samples, rows), again], how="diagonal"), later)
    assert [item.since for item in of(health(twice), "orphaned-engine")] == [times[0], later[0][0]]


def test_server_that_ends_with_its_engine_leaves_no_orphan(serving: Path) -> None:
    assert not of(health(recordings.read(serving, KILLED)), "orphaned-engine")


def test_refused_start_in_a_log_is_a_request_that_is_too_large(serving: Path) -> None:
    event = EngineEvent("request-too-large", "To serve at least one request with the model's max seq len (2048), ...")
    result = health(recordings.read(serving, DIED), EngineContext(events=(event,)))
    assert "did not start" in only(result, "request-too-large").summary


def test_events_of_a_job_count_for_its_engines_only() -> None:
    at = BEGIN + timedelta(seconds=600)
    samples = synthetic(600, 15, running=1.0, waiting=0.0, generation_tokens=lambda t: t).with_columns(job=pl.lit("77"))
    cluster = samples["cluster"][0]
    event = EngineEvent("host-out-of-memory", "Slurm ended job 77: OUT_OF_MEMORY", at)
    (result,) = diagnose_all(samples.lazy(), Fleet(events={(cluster, "77"): [event]}))
    assert "host memory" in only(result, "out-of-memory").summary
    for other in ((cluster, "78"), ("elsewhere", "77")):
        (none,) = diagnose_all(samples.lazy(), Fleet(events={other: [event]}))
        assert not of(none, "out-of-memory")
    (logged,) = diagnose_all(samples.lazy(), Fleet(log_events=(event,)))
    assert of(logged, "out-of-memory")


def test_event_near_several_ends_is_assigned_to_none_of_them() -> None:
    """An error without a time may be of either end, and two kinds of memory that ran out are two diagnoses."""
    down = lambda t: 1800 <= t < 2100 or 3000 <= t < 3300  # noqa: E731
    samples = synthetic(
        3600, running=lambda t: None if down(t) else 1.0, generation_tokens=lambda t: None if down(t) else t,
        error=lambda t: "[Errno 111] Connection refused" if down(t) else None,
        start_time=lambda t: None if down(t) else 100.0 + 50 * ((t >= 2100) + (t >= 3300)),
    )  # fmt: skip
    at = BEGIN + timedelta(seconds=1850)
    host, gpu = (EngineEvent(f"{kind}-out-of-memory", "out of memory", at) for kind in ("host", "gpu"))
    both = of(health(samples, EngineContext(events=(host, gpu))), "out-of-memory")
    assert sorted(diagnosis.summary for diagnosis in both) == [
        f"The engine ran out of {kind} memory." for kind in ("GPU", "host")
    ]
    undated = of(health(samples, EngineContext(events=(EngineEvent(gpu.kind, gpu.text),))), "out-of-memory")
    ends = of(health(samples), "ended")
    assert [(item.since, item.until) for item in undated] == [(ends[0].since, ends[-1].until)]


def test_out_of_memory_advises_less_memory_and_preemption_more(serving: Path) -> None:
    """On preemptions, vLLM's manual advises to raise the memory share. After an out-of-memory error that is wrong."""
    samples = recordings.read(serving, DIED)
    failed = samples.filter(pl.col("error").is_not_null())["time"][0]
    event = EngineEvent("gpu-out-of-memory", "torch.OutOfMemoryError: CUDA out of memory.", failed)
    result = only(health(samples, EngineContext(events=(event,))), "out-of-memory")
    assert result.confidence == 1.0
    assert result.advice.startswith("Lower")
    storm = of(health(recordings.read(serving, SHORT)), "preemption-storm")[0]
    assert "raise the memory share" in storm.advice


# Synthetic samples


def test_stall_with_a_full_cache() -> None:
    stuck = lambda t: t >= 3600  # noqa: E731
    result = health(synthetic(
        7200, running=lambda t: 0.0 if stuck(t) else 8.0, waiting=lambda t: 5.0 if stuck(t) else 0.0,
        kv_usage=lambda t: 0.98 if stuck(t) else 0.6, generation_tokens=lambda t: 100 * min(t, 3600),
        finished=lambda t: min(t, 3600) / 10,
    ))  # fmt: skip
    item = only(result, "stalled")
    assert abs((item.since - BEGIN).total_seconds() - 3600) <= 30
    assert item in result.current
    assert not of(result, "request-too-large")
    assert not of(result, "queue-unstable")


def test_stall_at_the_limit_of_the_batch() -> None:
    """Requests wait for a place in the batch, not for the KV cache; histograms have none of them, because none ends."""
    stuck = lambda t: t >= 3600  # noqa: E731
    result = health(synthetic(
        7200, running=lambda t: 16.0 if stuck(t) else 8.0, waiting=lambda t: 5.0 if stuck(t) else 0.0, kv_usage=0.2,
        generation_tokens=lambda t: 100 * min(t, 3600), finished=lambda t: min(t, 3600) / 10,
    ))  # fmt: skip
    item = only(result, "stalled")
    assert abs((item.since - BEGIN).total_seconds() - 3600) <= 30
    assert item in result.current


def test_request_that_is_never_started() -> None:
    result = health(synthetic(
        3600, running=lambda t: 2.0 if t < 1800 else 0.0, waiting=lambda t: 0.0 if t < 1800 else 1 + (t > 2700),
        kv_usage=lambda t: 0.3 if t < 1800 else 0.0, generation_tokens=lambda t: 50 * min(t, 1800),
        finished=lambda t: min(t, 1800) / 20,
    ))  # fmt: skip
    assert only(result, "request-too-large").confidence > 0.7
    assert not of(result, "stalled")


def test_request_that_is_started_again_and_again() -> None:
    """Its prefill fills the cache, it preempts itself, and starts again; no token is ever generated."""
    result = health(synthetic(
        3600, 5, running=lambda t: 1.0, waiting=lambda t: 0.0, kv_usage=lambda t: (t % 60) / 60,
        generation_tokens=lambda t: 900.0, finished=lambda t: 3.0, preemptions=lambda t: t // 60,
    ))  # fmt: skip
    assert "again and again" in only(result, "request-too-large").summary


def test_long_prefill_is_not_a_stall() -> None:
    """An engine that often pauses for two minutes does not stall when it pauses for three."""
    moves = lambda t: float(int(t // 120) * 100) if t < 3000 else 2500.0 + 100 * (t >= 3180)  # noqa: E731
    result = health(synthetic(3600, running=1.0, waiting=0.0, kv_usage=0.6, generation_tokens=moves, finished=0.0))
    assert not of(result, "stalled")


def test_unknown_queue_is_not_an_empty_one() -> None:
    """The share of samples in which requests waited is that of the samples whose queue is known."""
    result = health(synthetic(
        3600, running=1.0, waiting=lambda t: 2.0 if t % 600 == 0 else None, kv_usage=0.2,
        generation_tokens=lambda t: 10 * t,
    ))  # fmt: skip
    (queue,) = [item for item in only(result, "healthy").evidence if item.dimension == "queue"]
    assert queue.met is False
    assert "100 %" in queue.text


def test_stopped_server_is_not_overloaded() -> None:
    """It receives the requests of the time in which it was stopped at once, and serves them when it continues.

    The values are those of vLLM whose API server was stopped for 41 s.
    """
    stopped = lambda t: 60 < t < 101  # noqa: E731
    queue = lambda t: 0.0 if t <= 60 else 58 + (t - 101) * 5.5 if t <= 107 else max(0.0, 91 - 5 * (t - 107))  # noqa: E731
    tokens = lambda t: (  # noqa: E731
        250 * t if t <= 60 else 15_000 + 700 + 15 * (t - 101) if t <= 107 else 15_800 + 900 * (t - 107)
    )
    result = health(synthetic(
        200, 1, waiting=lambda t: None if stopped(t) else queue(t), running=lambda t: None if stopped(t) else 8.0,
        generation_tokens=lambda t: None if stopped(t) else tokens(t),
        finished=lambda t: None if stopped(t) else tokens(t) // 150,
        error=lambda t: "timed out" if stopped(t) else None,
    ))  # fmt: skip
    assert not of(result, "queue-unstable")
    assert not any(d.since <= BEGIN + timedelta(seconds=80) <= d.until for d in result.diagnoses)


def test_swap_thrashing() -> None:
    result = health(synthetic(
        3600, running=10.0, waiting=5.0, kv_usage=0.99, swapped=lambda t: 4.0 * (int(t // 60) % 2),
        generation_tokens=lambda t: 10 * t, finished=lambda t: t / 30,
    ))  # fmt: skip
    assert only(result, "swap-thrashing").confidence == 1.0


def test_idle_engine_with_its_cost() -> None:
    result = health(
        synthetic(7200, running=0.0, waiting=0.0, kv_usage=0.0, generation_tokens=500.0),
        EngineContext(gpus=gpus(7200, fb_used_mib=40960.0, fb_total_mib=81920.0, util_pct=0.0, power_w=60.0)),
    )
    figures = dict(only(result, "idle").figures)
    assert figures["gpu_hours"] == pytest.approx(2.0, abs=0.02)
    assert figures["gib_hours"] == pytest.approx(80.0, abs=0.5)
    assert not of(result, "squatter-signature")
    assert not of(result, "healthy")


def test_sleeping_engine_is_not_a_squatter() -> None:
    result = health(
        synthetic(7200, running=0.0, waiting=0.0, asleep=True, generation_tokens=500.0),
        EngineContext(gpus=gpus(7200, fb_used_mib=80000.0, fb_total_mib=81920.0, util_pct=0.0), job_running=True),
    )
    assert {diagnosis.kind for diagnosis in result.diagnoses} == {"asleep"}
    assert "still held" in only(result, "asleep").doubt


@pytest.mark.parametrize(("power", "text"), [(60.0, "draws little"), (650.0, "contradicts")])
def test_squatter_signature_mentions_the_power(power: float, text: str) -> None:
    result = health(
        synthetic(7200, running=0.0, waiting=0.0, generation_tokens=500.0),
        EngineContext(
            gpus=gpus(7200, fb_used_mib=80000.0, fb_total_mib=81920.0, util_pct=0.0, power_w=power), job_running=True
        ),
    )
    assert text in only(result, "squatter-signature").doubt
    ended = EngineContext(gpus=gpus(7200, fb_used_mib=80000.0, fb_total_mib=81920.0, util_pct=0.0), job_running=False)
    assert not of(health(synthetic(7200, running=0.0), ended), "squatter-signature")


def test_unknown_activity_is_not_idle() -> None:
    assert not health(synthetic(7200, kv_usage=0.0)).diagnoses


def test_memory_leak() -> None:
    gib = 2.0**30
    leak = synthetic(36000, running=lambda t: 4.0 + 3 * np.sin(t / 900), waiting=0.0, generation_tokens=lambda t: t,
                     rss_bytes=lambda t: 2 * gib + 30_000 * t + 5e7 * np.sin(t / 700),
                     uncollectable=lambda t: t // 60)  # fmt: skip
    item = only(health(leak), "memory-leak")
    assert dict(item.figures)["bytes_per_hour"] == pytest.approx(30_000 * 3600, rel=0.25)
    caches = leak.with_columns(rss_bytes=3 * gib - gib * (-(pl.arange(pl.len()) / 200.0)).exp())
    assert not of(health(caches), "memory-leak")
    load = pl.arange(pl.len()).cast(pl.Float64)
    busier = leak.with_columns(waiting=load, rss_bytes=2 * gib + load * 500_000)
    assert not of(health(busier), "memory-leak")


def test_prompts_of_an_engine_without_lengths_are_those_it_processed() -> None:
    """SGLang has no histogram of lengths unless an option asks for it."""
    samples = synthetic(
        1800, 15, running=20.0, waiting=5.0, kv_usage=0.99, kv_tokens=100_000.0, preemptions=lambda t: t,
        prompt_tokens=lambda t: 2000 * t, finished=lambda t: 2 * t, generation_tokens=lambda t: 500 * t,
    )  # fmt: skip
    assert dict(only(health(samples), "preemption-storm").figures)["recomputed_share"] == pytest.approx(1000 / 3500)


def test_throughput_lost_to_retractions() -> None:
    """Output falls from 429 to 30 tokens/s once requests are retracted, and does not recover."""
    storm = lambda t: max(0.0, t - 1800)  # noqa: E731
    result = health(synthetic(
        3600, running=20.0, waiting=lambda t: 40.0 if t > 1800 else 0.0, kv_usage=lambda t: 0.99 if t > 1800 else 0.8,
        generation_tokens=lambda t: 429 * min(t, 1800) + 30 * storm(t), preemptions=lambda t: storm(t) / 2,
        finished=lambda t: min(t, 1800) / 5 + storm(t) / 80,
    ))  # fmt: skip
    assert dict(only(result, "preemption-storm").figures)["lost_share"] == pytest.approx(0.93, abs=0.02)


def test_single_batch_of_requests_is_not_an_overload() -> None:
    """300 requests that arrive at once wait, and are served: a burst."""
    result = health(synthetic(
        7200, running=lambda t: 16.0, waiting=lambda t: max(0.0, 300 - (t - 3600) / 8) if t >= 3600 else 0.0,
        kv_usage=0.9, generation_tokens=lambda t: 400 * t, finished=lambda t: t / 8,
    ))  # fmt: skip
    assert not of(result, "queue-unstable")


def test_fixed_number_of_clients_is_not_an_overload() -> None:
    """A closed loop keeps 40 requests waiting: saturated, not unstable."""
    rng = np.random.default_rng(3)
    result = health(synthetic(
        14400, running=24.0, waiting=lambda t: 40.0 + rng.integers(-4, 5) if t > 600 else 0.0, kv_usage=0.97,
        generation_tokens=lambda t: 900 * t, finished=lambda t: t * 4,
    ))  # fmt: skip
    assert not of(result, "queue-unstable")
    assert of(result, "kv-saturated")


def test_rejected_requests_count_as_queued() -> None:
    """The queue is bounded: it stays at its limit while more and more requests are rejected."""
    result = health(synthetic(
        7200, running=24.0, waiting=lambda t: 0.0 if t < 1800 else 100.0, kv_usage=lambda t: 0.6 if t < 1800 else 0.98,
        generation_tokens=lambda t: 900 * t, finished=lambda t: t * 4, rejected=lambda t: max(0.0, t - 1800) * 2,
    ))  # fmt: skip
    growth = only(result, "queue-unstable")
    assert dict(growth.figures)["overload"] == pytest.approx(1.5, abs=0.1)
    assert "were rejected" in growth.summary


# The queue test on a synthetic engine with known load

ENGINES = {"a fifth of the cache": Engine(8192, 1400, 300), "a batch of 8": Engine(10**6, 300, 200, 0.03, batch=8)}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("load", "unstable"), [(0.5, False), (0.8, False), (0.95, False), (1.3, True), (1.5, True)])
def test_load_decides_about_stability(name: str, load: float, unstable: bool) -> None:
    engine = ENGINES[name]
    rate = service_rate(engine)
    for seed in range(3):
        result = health(simulate(engine, load * rate, 5400, seed))
        assert bool(of(result, "queue-unstable")) == unstable, (seed, result.diagnoses)


@pytest.mark.parametrize("seed", range(5))
def test_overload_of_a_slow_engine(seed: int) -> None:
    """It gets a few requests per minute: their small numbers do not look like arrivals in batches."""
    engine = Engine(24_000, 4000, 800, 0.032)
    calm = simulate(engine, 0.05, 900, seed)
    over = simulate(engine, 1.5 * service_rate(engine), 900, seed + 50)
    counters = [name for name in ("finished", "generation_tokens", "prompt_tokens") if name in over.columns]
    later = over.with_columns(
        pl.col("time").dt.offset_by("900s"), *(pl.col(name) + calm[name][-1] for name in counters)
    )
    result = health(pl.concat([calm.with_columns(waiting=pl.lit(0.0)), later]))
    (item,) = of(result, "queue-unstable")
    assert item.since >= BEGIN + timedelta(seconds=840)


def test_batches_of_arrivals_are_not_an_overload() -> None:
    engine = ENGINES["a fifth of the cache"]
    rate = service_rate(engine)
    for seed in range(4):
        assert not of(health(simulate(engine, 0.8 * rate, 5400, seed, bursts=5.0)), "queue-unstable")


# Many engines


def test_fleet_is_diagnosed_engine_by_engine(serving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_affinode.engines.diagnosis.examination.ROWS", 300)
    samples = pl.concat([
        recordings.read(serving, name).with_columns(address=pl.lit(address), model=pl.lit(None, pl.String))
        for address, name in (("b", LLAMA), ("a", SHORT), ("c", KILLED))
    ])  # fmt: skip
    result = list(diagnose_all(samples.lazy()))
    assert [figure.key.address for figure in result] == ["a", "b", "c"]
    assert [len(of(item, "queue-unstable")) for item in result] == [1, 1, 0]
    assert result[0].job == "77"
    assert result[0].user == "ada"
    alone = health(samples.filter(pl.col("address") == "a"))
    assert result[0].diagnoses == alone.diagnoses
    # Several processes diagnose parts of them, if there are many and this machine has the cores.
    assert list(of_each(samples.lazy(), attrgetter("health"), many=2)) == result


def test_fleet_joins_gpus_and_jobs() -> None:
    samples = synthetic(7200, running=0.0, waiting=0.0, generation_tokens=500.0)
    metrics = gpus(7200, fb_used_mib=80000.0, fb_total_mib=81920.0, util_pct=0.0, power_w=60.0)
    (result,) = diagnose_all(samples.lazy(), Fleet(gpus=metrics.lazy(), ends={(samples["cluster"][0], "77"): None}))
    assert {"idle", "squatter-signature"} == {diagnosis.kind for diagnosis in result.diagnoses}
    ended = {(samples["cluster"][0], "77"): BEGIN + timedelta(seconds=3600)}
    (over,) = diagnose_all(samples.lazy(), Fleet(gpus=metrics.lazy(), ends=ended))
    assert "squatter-signature" not in {diagnosis.kind for diagnosis in over.diagnoses}
    assert result.gpus == ("GPU-1",)


def test_jobs_at_one_address_are_engines_of_their_own() -> None:
    """A later job at the address has neither the diagnoses nor the user, GPUs and events of an earlier one."""
    first = synthetic(7200, running=0.0, waiting=0.0, generation_tokens=500.0).with_columns(user=pl.lit("ann"))
    second = synthetic(3600, running=1.0, waiting=0.0, generation_tokens=lambda t: t).with_columns(
        pl.col("time") + timedelta(hours=3), job=pl.lit("78"), gpus=pl.lit("GPU-2"), user=pl.lit(None, pl.String)
    )
    failed = second.head(1).with_columns(
        pl.col("time") - timedelta(minutes=50),
        job=pl.lit(None, pl.String),
        gpus=pl.lit(None, pl.String),
        error=pl.lit("refused"),
    )
    event = EngineEvent("host-out-of-memory", "Slurm ended job 77: OUT_OF_MEMORY", BEGIN + timedelta(seconds=7190))
    fleet = Fleet(events={("lab", "77"): [event]}, ends={("lab", "77"): event.time, ("lab", "78"): None})
    result = list(diagnose_all(pl.concat([second, failed, first]).lazy(), fleet))
    assert [(job.job, job.user, job.gpus, job.samples, job.failed) for job in result] == [
        ("77", "ann", ("GPU-1",), 481, 1), ("78", None, ("GPU-2",), 240, 0),
    ]  # fmt: skip
    assert of(result[0], "idle")
    assert of(result[0], "out-of-memory")
    assert {diagnosis.kind for diagnosis in result[1].diagnoses} == {"healthy"}


def test_missing_columns_are_unknown() -> None:
    samples = synthetic(3600, running=1.0, generation_tokens=lambda t: t).select(
        "cluster", "node", "address", "engine", "model", "rank", "time", "running", "generation_tokens"
    )
    (result,) = diagnose_all(samples.lazy())
    assert {diagnosis.kind for diagnosis in result.diagnoses} == {"healthy"}


def test_every_diagnosis_has_a_rule() -> None:
    assert set(RULES) == set(DIAGNOSES)


@pytest.mark.parametrize("change", [
    lambda s: s.head(1),
    lambda s: s.head(2),
    lambda s: s.with_columns(error=pl.lit("timed out")),
    lambda s: s.with_columns(waiting=pl.lit(float("nan")), running=pl.lit(float("inf"))),
    lambda s: s.sample(fraction=1.0, shuffle=True, seed=1),
    lambda s: pl.concat([s, s]),
])  # fmt: skip
def test_damaged_samples_are_diagnosed(serving: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    for name in (SHORT, LLAMA, DIED):
        for result in examine(KEY, change(recordings.read(serving, name))):
            assert all(
                diagnosis.since <= diagnosis.until and 0 <= diagnosis.confidence <= 1
                for diagnosis in result.health.diagnoses
            )
            assert all(diagnosis.as_json() for diagnosis in result.health.diagnoses)


def test_saturation_below_the_usual_level_names_the_level_with_a_queue() -> None:
    """A usage below *the cache is full from* would contradict it."""
    result = health(synthetic(
        3600, running=10.0, waiting=5.0, kv_usage=0.74, generation_tokens=lambda t: 100 * t, finished=lambda t: t / 10
    ))  # fmt: skip
    (kv,) = [item for item in only(result, "kv-saturated").evidence if item.dimension == "kv"]
    assert "and from 0.74 while requests wait" in kv.text


def test_queue_without_progress_is_a_stall_at_any_kv_usage() -> None:
    """The batch is full at ``max_running``, and no request ends; histograms have no request that never ends."""
    result = health(synthetic(
        3600, running=4.0, waiting=3.0, max_running=4.0, kv_usage=0.2, finished=lambda t: min(t, 1800) / 10,
        generation_tokens=lambda t: 100 * min(t, 1800),
    ))  # fmt: skip
    assert only(result, "stalled").since >= BEGIN + timedelta(seconds=1700)
