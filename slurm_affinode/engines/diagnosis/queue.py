"""Queue instability: requests arrive faster than they are served.

The test is for drift of the queue against its own random fluctuation, so it holds for engines of any speed and any
scrape interval, with and without KV metrics. The fluctuation is measured from the changes between scrapes, and is at
least that of Poisson arrivals.

The token-based estimate of the overload is that of arXiv 2605.04595.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slurm_affinode.engines.diagnosis.capacity import Capacity
from slurm_affinode.engines.diagnosis.episodes import Leg, close_s, legs, runs
from slurm_affinode.engines.diagnosis.rules import diagnosis, evidence
from slurm_affinode.engines.diagnosis.series import EngineSeries, Floats, Integers, moment
from slurm_affinode.model.finding import Evidence
from slurm_affinode.model.serving import Diagnosis

SIGNIFICANT = 3.5
"""Standard deviations. Excursions of a stable queue seldom have more than 3, however long they last."""
_LEAST = SIGNIFICANT**2
"""Requests. Less growth cannot be significant, as its own arrivals fluctuate by their square root."""
SUSTAINED_S = 20.0
SUSTAINED_REQUESTS = 3.0
"""Times a request's processing time: a burst of arrivals is over sooner."""
LARGEST_STEP = 0.75
"""Share of the growth that may fall between two scrapes. More is a burst, not a rate."""
EMPTY_SHARE = 0.05
MODEL_ERROR = 0.1
"""Relative error of the token-based estimate itself, as published for an A100."""
_PERIOD_S, _PERIODS = 5.0, 24
_ARRIVALS = 5.0
"""Requests in a period, on average. With fewer, the median of the squares is that of small integers, and too large."""
_MEDIAN_SQUARE = 0.455
"""Median of squared deviations, relative to their variance, for a normal distribution."""
_FEW = 5
"""Intervals from which the fluctuation can be estimated from the queue itself."""
_LATE = 3
"""Scrapes without growth, within which an overload is not over,"""
_DIP = 0.2
"""unless the queue falls by this share."""
_PAUSE = 0.1
"""Share of the usual output rate below which an engine is paused: it was stopped, or not scheduled,"""
_PAUSED = 0.5
"""for this share of the time in which its queue grew. That is not the load."""
_EDGE = 0.02
"""Share of the growth at its begin and end that is left out of the estimate of the fluctuation."""
_CALM = 0.1
"""Share of the growth up to which the queue belongs to the load before it."""
_PARTS = 8
_SMALLEST_SQUARES = 0.368
"""Mean of the smallest three quarters of squared deviations, relative to their variance, for a normal distribution."""
_LENGTH_VARIATION = 0.5
"""Coefficient of variation of output lengths up to which the estimate's error accounts, if no histogram is exported."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a queue over an interval."""

    first: int
    last: int
    rise: float
    """Requests."""
    deviations: float
    """Growth in standard deviations of its random fluctuation."""
    steps: int
    """Intervals between scrapes."""
    arrivals: float | None
    """Requests per second, rejected ones included."""
    service: float | None
    """Requests completed per second."""


def instabilities(series: EngineSeries, capacity: Capacity) -> list[Diagnosis]:
    """Return the overloads of the engine, and the times in which it recovers from them."""
    backlog = _backlog(series)
    if not (backlog >= _LEAST).any():
        return []
    dispersion = _dispersion(series, backlog)
    diagnoses: list[Diagnosis] = []
    for first, last in runs(series, backlog > 0):
        if backlog[first : last + 1].max() < _LEAST:
            continue
        lead, tail = _widen(series, first, last)
        positions = np.arange(lead, tail + 1)
        positions = positions[np.isfinite(backlog[positions])]
        if len(positions) < 3 or float(backlog[positions].max()) < _LEAST:
            continue
        diagnoses += _queue_diagnosis(series, capacity, positions, backlog[positions], dispersion)
    return diagnoses


def _backlog(series: EngineSeries) -> Floats:
    """Return the requests in the queue, with those rejected since the queue was last empty."""
    waiting = series.value("waiting")
    rejected = np.nan_to_num(series.change("rejected"))
    if not (rejected > 0).any():
        return waiting
    total = np.cumsum(rejected)
    calm = np.where((waiting == 0) & (rejected == 0), total, 0.0)
    return waiting + total - np.maximum.accumulate(calm)


def _dispersion(series: EngineSeries, backlog: Floats) -> float:
    """Return the variance of arrivals relative to that of Poisson arrivals, at least 1: requests may come in batches.

    It is estimated over the whole series, busy or not, from neighboring periods of at least 5 s and 5 requests.
    """
    ended = series.change("finished")
    if not np.isfinite(ended).any():
        ended = series.change("e2e_count")
    requests = backlog + np.nan_to_num(series.value("running"))
    arrived = ended + np.concatenate([[np.nan], np.diff(requests)])
    finite = np.isfinite(arrived)
    total, clock = np.cumsum(np.where(finite, arrived, 0.0)), np.cumsum(np.where(finite, series.interval, 0.0))
    if not len(clock) or clock[-1] < _PERIOD_S * _PARTS or total[-1] <= 0:
        return 1.0
    period = max(_PERIOD_S, series.step_s, _ARRIVALS * float(clock[-1] / total[-1]))
    edges = np.unique(np.searchsorted(clock, np.arange(0.0, clock[-1], period)))
    counts, spans = np.diff(total[edges]), np.diff(clock[edges])
    spans = np.where(spans > 0, spans, np.nan)
    rate = (counts[1:] + counts[:-1]) / (spans[1:] + spans[:-1])
    squares = np.diff(counts / spans) ** 2 / (1 / spans[1:] + 1 / spans[:-1]) / np.where(rate > 0, rate, np.nan)
    squares = squares[np.isfinite(squares)]
    # The median: a change of the rate is no fluctuation.
    return max(1.0, float(np.median(squares)) / _MEDIAN_SQUARE) if len(squares) >= _PERIODS else 1.0


def _widen(series: EngineSeries, first: int, last: int) -> tuple[int, int]:
    """Include the sample before and after the episode, if they are of its segment: the queue was empty there."""
    for begin, end in series.segments:
        if begin <= first < end:
            return max(begin, first - 1), min(end - 1, last + 1)
    return first, last


def _variance(time: Floats, queue: Floats, rate: float) -> float:
    """Return the variance of the queue's random changes per second, as of a random walk with a trend.

    There are three estimates, each of which a different deviation from this model makes too large: differences of
    neighboring changes (late scrapes and delayed updates), the distance from a line (a trend that changes), and from a
    parabola (both, but less). The smallest one counts. It is at least ``rate``, events per second, as for Poisson
    arrivals.
    """
    length, steps = float(time[-1] - time[0]), len(time) - 1
    if steps < _FEW or length <= 0:
        return max(rate, 1e-9)
    scale = max(1, steps // _PARTS)
    spans, change = np.diff(time[::scale]), np.diff(queue[::scale])
    squares = np.sort(np.diff(change / spans) ** 2 / (1 / spans[1:] + 1 / spans[:-1]))
    variances = [float(squares[: math.ceil(0.75 * len(squares))].mean()) / _SMALLEST_SQUARES]
    scaled_time = 2 * (time - time[0]) / length - 1
    line = queue[0] + (queue[-1] - queue[0]) * (scaled_time + 1) / 2
    variances.append(6 * float(np.mean((queue - line) ** 2)) / length)  # mean square of a Brownian bridge: V T / 6
    if steps >= _PARTS and min(variances) > max(rate, 1e-9):  # otherwise the third one makes no difference
        basis = np.vander(scaled_time, 3)
        residuals = queue - basis @ np.linalg.lstsq(basis, queue, rcond=None)[0]
        # Mean square of Brownian motion without its parabola: 3 V T / 70.
        variances.append(70 / 3 * float(np.mean(residuals**2)) / length)
    return max(min(variances), rate, 1e-9)


def _queue_diagnosis(
    series: EngineSeries, capacity: Capacity, positions: Integers, queue: Floats, dispersion: float
) -> list[Diagnosis]:
    time = series.time[positions]
    parts = legs(time, queue, _variance(time, queue, 0.0))
    growths: list[Growth] = []
    for leg in _merged(parts, queue):
        growth = _growth(series, positions, queue, leg, dispersion)
        if growth is None and (steeper := _after_calm(leg, queue)).first > leg.first:
            growth = _growth(series, positions, queue, steeper, dispersion)
        if growth is not None:
            growths.append(growth)
    diagnoses: list[Diagnosis] = []
    for number, growth in enumerate(growths):
        until = growths[number + 1].first if number + 1 < len(growths) else int(positions[-1])
        recovery = _recovery(series, positions, queue, growth, until)
        end = growth.last if recovery else _persistence(series, positions, queue, growth, until)
        diagnoses.append(_unstable(series, capacity, growth, end))
        diagnoses += recovery
    return diagnoses


def _persistence(series: EngineSeries, positions: Integers, queue: Floats, growth: Growth, until: int) -> int:
    """Return the last sample shortly after the growth at which the queue is as long as before.

    A queue fluctuates while it grows: an overload is not over because the last scrape saw a few requests less.
    """
    inside = (positions >= growth.last) & (positions <= until)
    where, level = positions[inside], queue[inside]
    limit = series.time[growth.last] + max(SUSTAINED_S, _LATE * series.step_s)
    fell = np.flatnonzero((level < (1 - _DIP) * level[0]) | (series.time[where] > limit))
    return int(where[fell[0] - 1] if len(fell) else where[-1])


def _merged(parts: list[Leg], queue: Floats) -> list[Leg]:
    """Return the rising legs; those between which the queue falls by less than a third of either are one."""
    rising: list[Leg] = []
    for leg in parts:
        if leg.rise <= 0:
            continue
        if rising:
            before = rising[-1]
            dip = float(queue[before.last] - queue[leg.first])
            whole = float(queue[leg.last] - queue[before.first])
            if dip < min(before.rise, leg.rise) / 3 and queue[leg.last] > queue[before.last]:
                rising[-1] = Leg(before.first, leg.last, whole)
                continue
        rising.append(leg)
    return rising


def _after_calm(leg: Leg, queue: Floats) -> Leg:
    """Return the growth without the time before it in which the queue was short, and fluctuated."""
    level = queue[leg.first : leg.last + 1] - queue[leg.first]
    begin = leg.first + int(np.flatnonzero(level <= _CALM * leg.rise)[-1])
    return Leg(begin, leg.last, float(queue[leg.last] - queue[begin]))


def _growth(series: EngineSeries, positions: Integers, queue: Floats, leg: Leg, dispersion: float) -> Growth | None:
    """Return the growth over a rising leg, or ``None`` if it is random, short, or a single burst."""
    time = series.time[positions]
    length, steps = float(time[leg.last] - time[leg.first]), leg.last - leg.first
    first, last = int(positions[leg.first]), int(positions[leg.last])
    if steps < 2 or length < SUSTAINED_S or leg.rise < _LEAST:
        return None
    service_s = _request_s(series, first, last)
    if service_s is not None and length < SUSTAINED_REQUESTS * service_s:
        return None
    served = _served(series, first, last)
    # Arrivals at a rate of at least the growth itself, and random service.
    rate = (dispersion * (leg.rise + (served or 0.0)) + 0.5 * (served or 0.0)) / length
    # The slow begin and end of the growth are left out of the estimate of its fluctuation.
    level = queue[leg.first : leg.last + 1] - queue[leg.first]
    begin = leg.first + int(np.flatnonzero(level <= _EDGE * leg.rise)[-1])
    end = leg.first + int(np.flatnonzero(level >= (1 - _EDGE) * leg.rise)[0])
    part = slice(begin, max(begin, end) + 1)
    deviations = leg.rise / math.sqrt(_variance(time[part], queue[part], rate) * length)
    if deviations < SIGNIFICANT:
        return None
    change, spans = np.diff(queue[leg.first : leg.last + 1]), np.diff(time[leg.first : leg.last + 1])
    # A scrape that came late covers more time, and may cover more of the growth.
    burst = change / leg.rise - spans / length
    if float(burst.max()) > LARGEST_STEP - 1 / steps or (
        steps == 2 and float((change / leg.rise).max()) > LARGEST_STEP
    ):
        return None
    if steps < _FEW and length < 2 * SUSTAINED_S:
        return None
    moving = series.progress[first + 1 : last + 1]
    if np.isfinite(moving).any() and float(np.nanmean(moving)) < 0.1:
        return None  # nothing is served at all: a stall
    if _paused_s(series, first, last) > _PAUSED * length:
        return None
    service = None if served is None else served / length
    held_change = _held_change(series, first, last)
    arrivals = (
        None
        if served is None or held_change is None
        else (served + held_change + (leg.rise - _waiting(series, first, last))) / length
    )
    return Growth(first, last, leg.rise, deviations, steps, arrivals, service)


def _paused_s(series: EngineSeries, first: int, last: int) -> float:
    """Return the seconds between two samples in which hardly any output was generated.

    A server that was stopped, and its scrapes with it, receives all requests of that time at once when it continues.
    """
    rate = series.change("generation_tokens") / series.interval
    usual = rate[rate > 0]
    if not len(usual):
        return 0.0
    part = slice(first + 1, last + 1)
    slow = rate[part] < _PAUSE * float(np.median(usual))
    return float(series.interval[part][slow].sum())


def _waiting(series: EngineSeries, first: int, last: int) -> float:
    waiting = series.value("waiting")
    return float(waiting[last] - waiting[first])


def _held_change(series: EngineSeries, first: int, last: int) -> float | None:
    running = series.value("running")
    grown = _waiting(series, first, last)
    return grown + float(running[last] - running[first]) if math.isfinite(running[last] - running[first]) else grown


def _served(series: EngineSeries, first: int, last: int) -> float | None:
    """Return the requests that ended between two samples, failed ones included."""
    for name in ("finished", "e2e_count", "generation_length_count"):
        finished = series.sum_of(name, first, last)
        if finished is not None:
            return finished + (series.sum_of("failed", first, last) or 0.0)
    return None


def _request_s(series: EngineSeries, first: int, last: int) -> float | None:
    """Return the mean time in which the engine processes a request, without its time in the queue."""
    finished = _served(series, first, last)
    work = [series.sum_of(name, first, last) for name in ("prefill_s", "decode_s")]
    if finished and None not in work and series.is_exported("finished"):
        return sum(seconds or 0.0 for seconds in work) / finished
    output = series.ratio_of("generation_length", "generation_length_count", first, last)
    each = series.ratio_of("token_latency_s", "token_latency_count", first, last)
    return output * each if output is not None and each is not None else None


def _unstable(series: EngineSeries, capacity: Capacity, growth: Growth, until: int) -> Diagnosis:
    first, last = growth.first, growth.last
    length = float(series.time[last] - series.time[first])
    begin, end = (float(series.value("waiting")[i]) for i in (first, last))
    ttft, usual = _first_token(series, growth)
    estimate = overload(series, capacity, growth)
    ratio = growth.arrivals / growth.service if growth.arrivals is not None and growth.service else None
    tokens, error = (None, None) if estimate is None else estimate
    rates_known = None not in (ratio, growth.arrivals, growth.service)
    arrivals, service = (growth.arrivals, growth.service) if rates_known else (None, None)
    proof = [
        evidence("queue-unstable.queue", growth.deviations, 0.4, least=SIGNIFICANT, rise=growth.rise, end=end,
                 length=length),
        _limit_evidence(series, capacity, growth),
        evidence("queue-unstable.arrivals" if rates_known else "queue-unstable.arrivals-unknown", growth.arrivals, 0.2,
                 service=service, ratio=ratio, met=ratio is not None and ratio > 1),
        evidence("queue-unstable.ttft", ttft, 0.1, usual=usual,
                 met=ttft is not None and (usual is None or ttft > 2 * usual)),
        evidence("queue-unstable.tokens", tokens, 0.1, error=error,
                 met=estimate is not None and estimate[0] + estimate[1] > 1),
    ]  # fmt: skip
    rejected = growth.rise - (end - begin)
    figures = {
        "overload": ratio, "overload_tokens": tokens, "overload_tokens_error": error, "arrivals_per_s": growth.arrivals,
        "served_per_s": growth.service, "waiting_max": series.peak_of("waiting", first, last),
        "deviations": growth.deviations, "ttft_s": ttft, "ttft_before_s": usual,
        "drain_s": end / growth.service if growth.service else None,
    }  # fmt: skip
    doubts = []
    if growth.steps < _FEW:
        doubts.append("queue-unstable.doubt-scrapes")
    if estimate is not None and estimate[0] + estimate[1] < 1:
        doubts.append("queue-unstable.doubt-tokens")
    return diagnosis(
        "queue-unstable.growth", moment(series.time[first]), moment(series.time[until]), proof, figures=figures,
        doubts=doubts, certainty=0.7 if growth.steps < _FEW else 1.0, begin=begin, end=end, length=length,
        rejected=None if rejected < 1 else rejected, arrivals=arrivals, service=service, overload=tokens, error=error,
        scrapes=growth.steps + 1,
    )  # fmt: skip


def _limit_evidence(series: EngineSeries, capacity: Capacity, growth: Growth) -> Evidence:
    part = slice(growth.first, growth.last + 1)
    full, batch = float(capacity.kv_full[part].mean()), float(capacity.batch_full[part].mean())
    limit_known = (
        series.is_exported("kv_usage") or series.is_exported("preemptions") or capacity.batch_limit is not None
    )
    share = max(full, batch)
    return evidence("queue-unstable.limit-batch" if batch > full else "queue-unstable.limit",
                    share * 100 if limit_known else None, 0.2, share=share, limit=capacity.batch_limit,
                    met=share >= 0.5)  # fmt: skip


def _first_token(series: EngineSeries, growth: Growth) -> tuple[float | None, float | None]:
    """Return the mean time to first token in the last third of the growth, and outside of queueing before it."""
    third = growth.last - max(1, (growth.last - growth.first) // 3)
    at_end = series.ratio_of("ttft_s", "ttft_count", third, growth.last)
    calm = np.zeros(len(series), np.bool_)
    calm[: growth.first] = series.value("waiting")[: growth.first] == 0
    time, count = series.change("ttft_s"), series.change("ttft_count")
    usable = calm & np.isfinite(time) & (count > 0)
    if usable.any():
        return at_end, float(time[usable].sum() / count[usable].sum())
    begin = series.ratio_of(
        "ttft_s", "ttft_count", growth.first, growth.first + max(1, (growth.last - growth.first) // 3)
    )
    return at_end, begin


def overload(series: EngineSeries, capacity: Capacity, growth: Growth) -> tuple[float, float] | None:
    """Return the arrival rate relative to M / (b E[g]), and its error (one standard deviation).

    It holds where the KV cache is the limit: ``None`` if that is not full, or if lengths or times are unknown.
    The time of an iteration, b, lies between the time that running requests need for a token (running / output rate)
    and the token latency, which includes pauses of preempted requests: their mean is used, their distance is an error.
    """
    first, last = growth.first, growth.last
    size = series.peak_of("kv_tokens", first, last)
    prompt = series.ratio_of("prompt_length", "prompt_length_count", first, last)
    output = series.ratio_of("generation_length", "generation_length_count", first, last)
    rate, running = series.rate_of("generation_tokens", first, last), series.mean_of("running", first, last)
    latency = series.ratio_of("token_latency_s", "token_latency_count", first, last)
    times = [seconds for seconds in (running / rate if running and rate else None, latency) if seconds]
    if growth.arrivals is None or not size or prompt is None or not output or not times:
        return None
    if float(capacity.kv_full[first : last + 1].mean()) < 0.5:
        return None
    iteration = math.sqrt(times[0] * times[-1])
    square, square_error = second_moment(series, first, last, output)
    demand = output * prompt + (square + output) / 2
    value = growth.arrivals * iteration * demand / size
    arrived = max(1.0, growth.arrivals * float(series.time[last] - series.time[first]))
    relative = [
        1 / math.sqrt(arrived),
        abs(math.log(times[0] / times[-1])) / 2,
        square_error / 2 / demand,
        MODEL_ERROR,
    ]
    return value, value * math.sqrt(math.fsum(error**2 for error in relative))


def second_moment(series: EngineSeries, first: int, last: int, mean: float) -> tuple[float, float]:
    """Return E[o²] of the output lengths and its error, from the histogram or from a typical variation.

    Lengths are uniform within a bucket, and scaled to their ``mean``, which is known exactly: buckets are wide.
    """
    before, after = series.buckets("generation_lengths", first), series.buckets("generation_lengths", last)
    if before and after and len(before) == len(after):
        counts = np.diff([0.0, *(b["count"] - a["count"] for a, b in zip(before, after, strict=True))])
        bounds = [0.0, *(bucket["le"] for bucket in after)]
        if math.isinf(bounds[-1]):
            bounds[-1] = bounds[-2] * 1.5
        low, high = np.array(bounds[:-1]), np.array(bounds[1:])
        total = float((counts * (low + high) / 2).sum())
        if counts.min() >= 0 and total > 0:
            middle = (low**2 + low * high + high**2) / 3
            scale = mean * float(counts.sum()) / total
            value = scale**2 * float((counts * middle).sum() / counts.sum())
            error = scale**2 * float((counts * (high**2 - low**2)).sum() / counts.sum()) / 4
            return max(value, mean**2), error
    half = _LENGTH_VARIATION**2 / 2
    return mean**2 * (1 + half), mean**2 * half


def _recovery(series: EngineSeries, positions: Integers, queue: Floats, growth: Growth, until: int) -> list[Diagnosis]:
    """Return the time in which the queue of an overload gets shorter, if it does."""
    inside = (positions >= growth.last) & (positions <= until)
    where, level = positions[inside], queue[inside]
    if len(where) < 3:
        return []
    peak = float(level[0])
    emptied = np.flatnonzero(level <= max(EMPTY_SHARE * peak, 1.0))
    end = int(emptied[0]) if len(emptied) else int(np.argmin(level))
    fallen = peak - float(level[end])
    first, last = int(where[0]), int(where[end])
    length = float(series.time[last] - series.time[first])
    if end < 2 or fallen < 0.25 * peak or length <= close_s(series) / 2:
        return []
    served = _served(series, first, last)
    final_queue = float(level[end])
    proof = [evidence("recovering.queue", fallen, 1.0, peak=peak, left=final_queue, length=length)]
    figures = {"waiting_max": peak, "served_per_s": served / length if served is not None and length else None}
    return [diagnosis(
        "recovering.emptied" if len(emptied) else "recovering.shorter", moment(series.time[first]),
        moment(series.time[last]), proof, figures=figures, peak=peak, left=final_queue, length=length,
    )]  # fmt: skip
