"""Fewest engines for a latency target: by hand, and general properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.traces.engine_model import EngineModel
from slurm_affinode.whatif.phases import (
    LLAMA2_70B,
    Deployment,
    LatencyTarget,
    RequestArrays,
    fewest_mixed,
    fewest_split,
)

ENGINE = EngineModel(kv_tokens=4096, max_running=8, base_s=0.1, per_request_s=0.0, per_prefill_token_s=0.01)


def requests(*rows: tuple[float, int, int]) -> RequestArrays:
    """Requests of rows of arrival, prompt and generated tokens."""
    arrival, context, generated = zip(*rows, strict=True)
    return RequestArrays(np.array(arrival, float), np.array(context, np.int64), np.array(generated, np.int64))


def only(deployments: list[Deployment | None]) -> Deployment:
    (deployment,) = deployments
    assert deployment is not None
    return deployment


def test_prompts_at_the_same_time_need_an_engine_each_to_prefill() -> None:
    """Two prompts take 1.1 s each; with one engine for prefill the second one is ready after 2.2 s."""
    both = requests((0, 100, 3), (0, 100, 3))
    hurried, patient = fewest_split(both, ENGINE, [LatencyTarget(1.2, 9), LatencyTarget(2.2, 9)], 0.0)
    assert hurried is not None
    assert patient is not None
    assert (hurried.engines, hurried.prefill_engines) == (3, 2)
    assert (patient.engines, patient.prefill_engines) == (2, 1)
    assert patient.queued_mean_s == pytest.approx(0.55)
    # 2.2 s of prefill and three iterations, as the second one joins the first one's after 1.1 s.
    assert patient.prefill_busy == pytest.approx(2.2 / 2.4)
    assert patient.decode_busy == pytest.approx(0.4 / 2.4)


def test_prefill_delays_tokens_of_others_unless_phases_are_separate() -> None:
    """The second prompt takes 1.1 s between two tokens of the first request, which shares its engine."""
    two = requests((0, 10, 5), (0.3, 100, 2))
    target = LatencyTarget(2.0, 0.11)
    mixed, split = only(fewest_mixed(two, ENGINE, [target])), only(fewest_split(two, ENGINE, [target], 0.0))
    assert (mixed.engines, mixed.prefill_engines) == (2, None)
    assert (split.engines, split.prefill_engines) == (2, 1)
    relaxed = only(fewest_mixed(two, ENGINE, [LatencyTarget(2.0, 0.5)]))
    assert relaxed.engines == 1
    assert relaxed.between_tokens_p99_s > 0.3


def test_prompts_in_chunks_need_fewer_engines_where_the_time_between_tokens_counts() -> None:
    """The second prompt takes 1.1 s, or ten tokens and 0.1 s in each of the three last iterations of the first request.

    It has 70 tokens left then, which take seven iterations.
    """
    two = requests((0, 10, 5), (0.3, 100, 2))
    target = LatencyTarget(2.5, 0.19)
    chunked = replace(ENGINE, chunk_tokens=11)
    assert only(fewest_mixed(two, replace(ENGINE, chunk_tokens=1000), [target])).engines == 2
    deployment = only(fewest_mixed(two, chunked, [target]))
    assert deployment.engines == 1
    assert deployment.between_tokens_p99_s == pytest.approx((0.1 + 3 * 0.2) / 4, rel=0.01)
    assert deployment.first_token_p99_s == pytest.approx(3 * 0.2 + 7 * 0.1 + 0.7, rel=0.02)
    assert only(fewest_split(two, chunked, [target], 0.0)) == only(fewest_split(two, ENGINE, [target], 0.0))


def test_request_alone_in_chunks_is_not_queued() -> None:
    deployment = only(fewest_mixed(requests((0, 100, 3)), replace(ENGINE, chunk_tokens=30), [LatencyTarget(2, 9)]))
    assert deployment.first_token_mean_s == pytest.approx(4 * 0.1 + 1.0)
    assert deployment.queued_mean_s == pytest.approx(0.0)
    assert fewest_mixed(requests((0, 100, 3)), replace(ENGINE, chunk_tokens=9), [LatencyTarget(2, 9)]) == [None]


def test_transfer_delays_the_second_token() -> None:
    item = requests((0, 100, 2))
    target = LatencyTarget(2.0, 9.0)
    moved = only(fewest_split(item, ENGINE, [target], 0.005))
    assert moved.between_tokens_p99_s == pytest.approx(0.1 + 100 * 0.005)
    assert only(fewest_split(item, ENGINE, [target], 0.0)).between_tokens_p99_s == pytest.approx(0.1)


def test_target_below_the_time_of_a_request_alone_is_not_reached() -> None:
    item = requests((0, 100, 3))
    targets = [LatencyTarget(1.0, 9.0), LatencyTarget(2.0, 0.05)]
    assert fewest_mixed(item, ENGINE, targets) == [None, None]
    assert fewest_split(item, ENGINE, targets, 0.0) == [None, None]


def test_requests_that_fit_no_engine_count_as_not_served_within_the_target() -> None:
    """99 % of 100 requests are the 99 that fit: two of these prefill at the same time, which needs two engines."""
    rows = [*((10.0 * at, 10, 2) for at in range(98)), (0.0, 10, 2), (5.0, 9000, 2)]
    target = LatencyTarget(0.25, 9.0)
    assert only(fewest_mixed(requests(*sorted(rows)), ENGINE, [LatencyTarget(0.31, 9.0)])).engines == 1
    both = [only(fewest_mixed(requests(*sorted(rows)), ENGINE, [target])),
            only(fewest_split(requests(*sorted(rows)), ENGINE, [target], 0.0))]  # fmt: skip
    assert [(item.engines, item.never_fits) for item in both] == [(2, 1), (3, 1)]


def test_time_between_tokens_does_not_matter_to_requests_of_one_token() -> None:
    assert only(fewest_mixed(requests((0, 10, 1)), ENGINE, [LatencyTarget(1.0, 0.01)])).engines == 1


ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 80), st.integers(1, 9)), min_size=1, max_size=15)


@settings(max_examples=30)
@given(rows=ROWS)
def test_deployments_meet_their_target(rows: list[tuple[int, int, int]]) -> None:
    some = requests(*sorted(rows))
    targets = [LatencyTarget(2.0, 0.4), LatencyTarget(2.0, 0.15)]
    loose, strict = fewest_mixed(some, ENGINE, targets)
    for target, deployments in zip(targets, ((loose,), (strict,)), strict=True):
        for deployment in (*deployments, *fewest_split(some, ENGINE, [target], 0.0)):
            assert deployment is not None
            assert deployment.first_token_p99_s <= target.first_token_s
            assert (deployment.between_tokens_p99_s is None) == all(generated < 2 for _, _, generated in rows)
            assert deployment.between_tokens_p99_s is None or deployment.between_tokens_p99_s <= target.between_tokens_s
            assert 0 < deployment.busy < 1 + 1e-9


def test_constants_are_near_the_published_measurements() -> None:
    """Splitwise's medians for Llama 2 70B on eight H100: prompts of 4,096 and 8,192 tokens, batches of 1 and 64."""

    def prompt_s(tokens: int) -> float:
        return LLAMA2_70B.base_s + LLAMA2_70B.per_prefill_token_s * tokens

    assert prompt_s(4096) == pytest.approx(0.390, rel=0.1)
    assert prompt_s(8192) == pytest.approx(0.827, rel=0.1)
    assert LLAMA2_70B.base_s + LLAMA2_70B.per_request_s == pytest.approx(0.0298, rel=0.01)
    assert LLAMA2_70B.base_s + 64 * LLAMA2_70B.per_request_s == pytest.approx(0.0502, rel=0.02)
