"""Memory held by idle GPUs: small hand-made traces with known results, then the published trace."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.traces import claims, fleet, gentd26
from slurm_affinode.traces.gentd26 import GenTrace

SCHEMA = {"time_s": pl.Float64(), "pod": pl.String(), "value": pl.Float64()}


def metric(rows: list[tuple[float, str | None, float]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def pods(duty: list[tuple[float, str | None, float]], memory: list[tuple[float, str | None, float]]) -> GenTrace:
    return GenTrace({"gpu_duty_cycle": metric(duty), "gpu_memory": metric(memory)}, None, {}, ())


def test_both_recipes_with_more_memory_held_while_busy() -> None:
    """The direct recipe sums the memory of idle samples; the recipe per pod uses the mean memory of the pod."""
    duty = [(0.0, "a", 0.0), (10.0, "a", 80.0), (0.0, "b", 0.0), (10.0, "b", 0.0)]
    memory = [(0.0, "a", 1e9), (10.0, "a", 3e9), (0.0, "b", 2e9), (10.0, "b", 2e9)]
    s = fleet.analyse(pods(duty, memory)).summary
    assert s.sample_step_s == 10
    assert s.memory_time_gb_samples == pytest.approx(8)
    assert s.idle_memory_time_gb_samples == pytest.approx(1 + 2 + 2)
    assert s.idle_memory_fraction == pytest.approx(5 / 8)
    assert s.idle_memory_time_gb_samples_per_device == pytest.approx(4 * 0.5 + 4 * 1.0)
    assert s.idle_memory_fraction_per_device == pytest.approx(6 / 8)
    assert s.idle_memory_time_gb_h == pytest.approx(5 * 10 / 3600)
    assert s.memory_idle_over_busy == pytest.approx((5 / 3) / 3)
    assert s.mean_concurrently_idle_memory_tb == pytest.approx(5 / 2 / 1000)
    assert s.all_devices_at_once_idle_memory_tb == pytest.approx(2 * 2 * 0.75 / 1000)


def test_only_samples_with_both_values_are_joined() -> None:
    """A pod or a time that occurs in only one table does not contribute to the sums."""
    duty = [(0.0, "a", 0.0), (57.0, "a", 0.0), (0.0, "only-duty", 0.0)]
    memory = [(0.0, "a", 4e9), (58.0, "a", 9e9), (0.0, "only-memory", 9e9)]
    s = fleet.analyse(pods(duty, memory)).summary
    assert (s.devices, s.memory_devices, s.joined_samples) == (2, 2, 1)
    assert s.memory_time_gb_samples == pytest.approx(4)


def test_repeated_rows_count_once_and_rows_without_pod_are_dropped() -> None:
    """The last row with the same pod and time counts; both cases are noted."""
    result = fleet.analyse(pods([(0.0, "a", 9.0), (0.0, "a", 0.0), (5.0, None, 0.0)], [(0.0, "a", 1e9)]))
    assert result.summary.samples == 1
    assert result.summary.idle_sample_fraction == 1
    assert any("repeat a pod and time" in note for note in result.notes)
    assert any("without a pod" in note for note in result.notes)


def test_sampling_interval_is_the_median_gap_within_pods() -> None:
    """A missing sample does not change it; a single sample per pod gives no interval."""
    rows = [(57.0 * i, pod, 0.0) for pod in ("a", "b") for i in range(20) if (pod, i) != ("a", 7)]
    assert fleet.sampling_step_s(metric(rows)) == 57
    assert fleet.sampling_step_s(metric([(0.0, "a", 1.0), (9.0, "b", 1.0)])) is None


def test_missing_tables_give_unknown_figures() -> None:
    """An empty trace gives no figures instead of zeros; the memory capacity of the GPUs is never guessed."""
    nothing = fleet.analyse(GenTrace({}, None, {}, ()))
    figures = nothing.summary.as_dict()
    assert {value for value in figures.values() if not isinstance(value, dict)} == {None}
    assert figures["load_latency_mean_s"] == dict.fromkeys(fleet.LOADS)
    only_memory = fleet.analyse(GenTrace({"gpu_memory": metric([(0.0, "a", 1e9)])}, None, {}, ()))
    assert only_memory.summary.memory_samples == 1
    assert only_memory.summary.idle_memory_fraction is None
    assert fleet_without_busy().memory_idle_over_busy is None


def test_memory_without_matching_duty_cycle_is_unknown() -> None:
    """Both tables have data, but at different times, so neither total nor idle memory is known."""
    summary = fleet.analyse(pods([(0.0, "a", 0.0), (60.0, "a", 0.0)], [(30.0, "a", 1e9)])).summary
    assert (summary.joined_samples, summary.memory_samples) == (0, 1)
    assert (summary.memory_time_gb_samples, summary.idle_memory_time_gb_samples) == (None, None)
    assert (summary.memory_time_gb_h, summary.idle_memory_time_gb_h) == (None, None)


def fleet_without_busy() -> fleet.ServingSummary:
    summary = fleet.analyse(pods([(0.0, "a", 0.0)], [(0.0, "a", 1e9)])).summary
    assert summary.gpu_memory_capacity_gb is None
    assert summary.memory_mean_busy_gb is None
    return summary


def test_hot_models_are_the_most_requested_twentieth() -> None:
    """One of three; requests without a model, or without a time, count for neither."""
    rows = [(10.0, "a", []), (20.0, "a", []), (None, "a", []), (1.0, "b", []), (4.0, "c", []), (99.0, None, [])]
    schema = {"exec_time_s": pl.Float64(), "base_model": pl.String(), "loras": pl.List(pl.String())}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    summary = fleet.analyse(GenTrace({}, table, {}, ())).summary
    assert (summary.exec_time_mean_hot_s, summary.exec_time_mean_cold_s) == (15.0, 2.5)
    alone = fleet.analyse(GenTrace({}, table.filter(pl.col("base_model") == "a"), {}, ())).summary
    assert (alone.exec_time_mean_hot_s, alone.exec_time_mean_cold_s) == (15.0, None)


def test_share_of_computation_needs_inference_shorter_than_end_to_end() -> None:
    """Samples of the same pod and time are compared; if most of them are reversed, the share is unknown."""
    predict = metric([(0.0, "a", 200.0), (57.0, "a", 300.0), (0.0, "b", 9.0), (5.0, None, 1.0)])
    whole = metric([(0.0, "a", 1000.0), (57.0, "a", 1000.0), (1.0, "b", 10.0)])
    summary = fleet.analyse(GenTrace({"predict": predict, "pipeline_inference": whole}, None, {}, ())).summary
    assert (summary.stage_pairs, summary.stage_pairs_reversed_fraction) == (2, 0.0)
    assert summary.computation_share_median == pytest.approx(0.25)
    turned = fleet.analyse(GenTrace({"predict": whole, "pipeline_inference": predict}, None, {}, ())).summary
    assert (turned.stage_pairs_reversed_fraction, turned.computation_share_median) == (1.0, None)
    assert turned.computation_share_exchanged_median == pytest.approx(0.25)
    lacking = fleet.analyse(GenTrace({"predict": predict}, None, {}, ())).summary
    assert (lacking.stage_pairs, lacking.computation_share_median) == (None, None)


def test_requests_without_base_model_are_not_in_popularity() -> None:
    """They are counted as requests, but for no model."""
    table = pl.DataFrame(
        {
            "exec_time_s": [1.0, 3.0, None, 5.0],
            "base_model": ["m", "m", None, "n"],
            "loras": [[], ["x"], ["x", "y"], []],
        },
        schema={"exec_time_s": pl.Float64(), "base_model": pl.String(), "loras": pl.List(pl.String)},
    )
    result = fleet.analyse(GenTrace({}, table, {}, ()))
    s = result.summary
    assert (s.requests, s.requests_without_lora, s.requests_with_lora) == (4, 2, 2)
    assert (s.base_models, s.lora_adapters) == (2, 2)
    assert s.exec_time_median_s == 3
    assert s.popularity_gini == pytest.approx((2 - 1) / (2 * 3))
    assert s.popularity_top5pct_share == pytest.approx(2 / 3)
    assert result.popularity.rows() == [("m", 2), ("n", 1)]


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 5.0, 19.0, 60.0, 100.0])),
        min_size=1, max_size=60, unique_by=lambda row: row[:2],
    )
)  # fmt: skip
def test_bands_and_pods_add_up(rows: list[tuple[int, str, float]]) -> None:
    """Each sample is in one band and one pod; idle memory never exceeds total memory in either recipe."""
    duty = [(float(t), pod, value) for t, pod, value in rows]
    memory = [(float(t), pod, 1e9 * (1 + t % 3)) for t, pod, _ in rows]
    result = fleet.analyse(pods(duty, memory))
    s = result.summary
    assert result.bands["samples"].sum() == s.samples == len(rows)
    assert result.devices["samples"].sum() == len(rows)
    assert result.bands["fraction"].sum() == pytest.approx(1)
    assert s.idle_memory_fraction is not None
    assert s.idle_memory_fraction_per_device is not None
    assert 0 <= s.idle_memory_fraction <= 1
    assert 0 <= s.idle_memory_fraction_per_device <= 1
    idle = {pod: [v for _, p, v in rows if p == pod] for pod in "abc"}
    for pod, samples, fraction in result.devices.select("pod", "samples", "idle_fraction").iter_rows():
        assert samples == len(idle[pod])
        assert fraction == pytest.approx(idle[pod].count(0.0) / samples)


@pytest.fixture(scope="module")
def published(shared_data: Path) -> fleet.ServingResult:
    """Return the analysis of the published trace."""
    return fleet.analyse(gentd26.read([shared_data / "gentd26"]))


REFERENCE = {
    # figure: (value, number of known decimals)
    "samples": (157_417, 0), "devices": (143, 0), "ticks": (1441, 0), "span_h": (22.8, 1), "sample_step_s": (57, 0),
    "devices_live_mean": (109, 0), "memory_devices": (144, 0), "joined_samples": (157_415, 0),
    "idle_sample_fraction": (0.6685, 4), "above_50pct_sample_fraction": (0.0233, 4),
    "utilization_mean_pct": (7.03, 2), "utilization_median_pct": (0, 6),
    "memory_time_gb_samples": (3_883_326.4, 1), "memory_time_gb_h": (61_486, 0),
    "idle_memory_time_gb_samples": (2_713_017.0, 1), "idle_memory_time_gb_h": (42_956, 0),
    "idle_memory_fraction": (0.6986, 4), "idle_memory_time_gb_samples_per_device": (2_591_300, 0),
    "idle_memory_fraction_per_device": (0.6673, 4), "memory_idle_over_busy": (0.8498, 4),
    "memory_mean_idle_gb": (25.78, 2), "memory_mean_busy_gb": (30.34, 2),
    "mean_concurrently_idle_memory_tb": (1.88, 2), "devices_mostly_below_5pct": (141, 0),
    "devices_mean_below_20pct_fraction": (0.965, 3),
    "requests": (68_195, 0), "requests_without_lora": (52_993, 0), "requests_with_lora": (15_202, 0),
    "exec_time_median_s": (23, 0), "exec_time_p99_s": (92, 0), "base_models": (104, 0), "lora_adapters": (874, 0),
    "exec_time_mean_hot_s": (28.3, 1), "exec_time_mean_cold_s": (23.7, 1), "stage_pairs": (6111, 0),
    "stage_pairs_reversed_fraction": (0.996, 3), "computation_share_exchanged_median": (0.721, 3),
    "popularity_gini": (0.883, 3), "popularity_top5pct_share": (0.750, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCE)
def test_published_trace_gives_known_figures(published: fleet.ServingResult, name: str) -> None:
    """Each figure is compared to its known number of decimals."""
    expected, digits = REFERENCE[name]
    result = published.summary.as_dict()[name]
    assert round(result, digits) == expected


def test_published_trace_gives_known_percentiles_and_latencies(published: fleet.ServingResult) -> None:
    """Percentiles over pods and load latencies, to their known decimals."""
    s = published.summary
    assert s.device_idle_fraction_percentiles is not None
    percentiles = {key: round(100 * (value or 0), 1) for key, value in s.device_idle_fraction_percentiles.items()}
    assert percentiles == {"p25": 64.5, "p50": 65.9, "p75": 68.4, "p90": 92.1}
    assert s.load_latency_mean_s is not None
    assert {key: round(value or 0, 2) for key, value in s.load_latency_mean_s.items()} == {
        "base_model": 21.99, "lora": 4.40, "controlnet": 4.68, "pipeline": 12.03,
    }  # fmt: skip


def test_published_claims_have_expected_verdicts(published: fleet.ServingResult) -> None:
    """Six claims are not borne out by the data; two of them are reproduced by another, named recipe.

    The share of computation is unknown, since its tables contradict their names.
    """
    judged = {c.id: c.verdict for c in claims.judge(claims.load("gentd26"), published.summary.as_dict())}
    assert {name: verdict for name, verdict in judged.items() if verdict != claims.BORNE_OUT} == {
        "idle-memory": claims.OTHER_RECIPE,
        "freeable": claims.OTHER_RECIPE,
        "pods-below-20": claims.NOT_BORNE_OUT,
        "memory-idle-mean": claims.NOT_BORNE_OUT,
        "exec-hot": claims.NOT_BORNE_OUT,
        "exec-cold": claims.NOT_BORNE_OUT,
        "computation-share": claims.UNKNOWN,
    }
    assert published.summary.computation_share_median is None
