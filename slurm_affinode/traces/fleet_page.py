"""The serving trace page: each finding with its charts, and the published statements about it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from markupsafe import Markup

from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Card
from slurm_affinode.report.format import quantity
from slurm_affinode.traces import fleet_charts, trace_page
from slurm_affinode.traces.claims import Claim
from slurm_affinode.traces.fleet import ServingResult, ServingSummary
from slurm_affinode.traces.trace_page import TraceFinding, TracePage, card

TITLE = "GenTD26: a fleet of image-generation pods"
_PAIRED = ("fleet", "popularity")


def html(result: ServingResult, claims: Sequence[Claim]) -> str:
    """Return the self-contained page."""
    return trace_page.html(TITLE, context(result, claims))


def context(result: ServingResult, claims: Sequence[Claim]) -> TracePage:
    """Return the context of the template, with all texts formatted."""
    s = result.summary
    rows = {
        key: tuple(trace_page.claim_row(c) for c in claims if c.finding == key) for key in {c.finding for c in claims}
    }
    findings = tuple(
        TraceFinding(key, title, tuple(sentences), charts, rows.get(key, ()), paired=key in _PAIRED)
        for key, title, sentences, charts in _findings(result, s)
    )
    return TracePage(
        answer=_answer(s),
        lead=_lead(s),
        cards=_cards(s),
        findings=findings,
        verdict_counts=trace_page.verdict_counts(claims),
        notes=result.notes,
        recipes=RECIPES,
        sources=trace_page.sources(claims),
    )


_share = partial(fmt.percent, digits=1)


def _answer(s: ServingSummary) -> str:
    if s.idle_memory_fraction is not None:
        return (
            f"{_share(s.idle_memory_fraction)} of the GPU memory that the pods held over time was held while their GPU "
            f"computed nothing: {quantity(s.mean_concurrently_idle_memory_tb, 'TB', 2)} at any moment, on average."
        )
    if s.idle_sample_fraction is not None:
        return f"The pods' GPUs computed nothing in {_share(s.idle_sample_fraction)} of the samples."
    return "The tables of GPU use are not in this copy of the trace."


def _lead(s: ServingSummary) -> str:
    if s.samples is None:
        return "Alibaba GenAI serving trace 2026."
    return (
        f"Alibaba GenAI serving trace 2026: {fmt.count(s.samples)} samples of {fmt.count(s.devices)} pods over "
        f"{quantity(s.span_h, 'h')}, {quantity(s.sample_step_s, 's')} apart; about "
        f"{fmt.number(s.devices_live_mean, digits=0)} pods live at once. The capacity of the GPUs is not in the trace."
    )


def _cards(s: ServingSummary) -> tuple[Card, ...]:
    return (
        card(
            "Samples at exactly 0", _share(s.idle_sample_fraction), f"of {fmt.count(s.samples)}",
            is_known=s.samples is not None, kind="idle", more="Samples whose duty cycle is 0, of all samples.",
        ),
        card(
            "Memory-time held idle", _share(s.idle_memory_fraction),
            f"{quantity(s.idle_memory_time_gb_h, 'GB h', 0)} of {quantity(s.memory_time_gb_h, 'GB h', 0)}",
            is_known=s.idle_memory_fraction is not None, kind="idle",
            more="Memory of the samples at 0, times the sampling interval, of the memory of all samples.",
        ),
        card(
            "Idle memory at once", quantity(s.mean_concurrently_idle_memory_tb, "TB", 2), "mean over the sample times",
            is_known=s.mean_concurrently_idle_memory_tb is not None,
            more="Memory held by all pods that are idle at the same time, averaged over the sample times.",
        ),
        card(
            "Mean duty cycle", quantity(s.utilization_mean_pct, "%", 1),
            f"median {quantity(s.utilization_median_pct, '%')}", is_known=s.utilization_mean_pct is not None,
        ),
        card(
            "Popularity of models", fmt.number(s.popularity_gini, digits=3),
            f"Gini coefficient, {fmt.count(s.requests)} requests",
            is_known=s.popularity_gini is not None,
            more="0: every base model is requested equally often; towards 1: one model gets every request.",
        ),
    )  # fmt: skip


def _findings(result: ServingResult, s: ServingSummary) -> list[tuple[str, str, list[str], tuple[Markup, ...]]]:
    chart = fleet_charts
    return [
        ("idle", "Most samples are at exactly zero", _idle(s), (chart.bands(result),)),
        ("memory", "Memory stays held while nothing computes", _memory(s), (chart.memory_bands(result),)),
        ("devices", "Per pod", _devices(s), (chart.devices(result), chart.device_percentiles(result))),
        ("fleet", "Idle memory of the fleet, by two recipes", _fleet(s), (chart.recipes(s), chart.over_time(result))),
        (
            "popularity", "Few models get most requests", _popularity(s),
            (chart.lorenz(result), chart.most_requested(result)),
        ),
        ("load", "Loading takes seconds", _load(s), (chart.load_latency(result),)),
        ("requests", "Requests", _requests(s), (chart.exec_times(result),)),
        ("host-memory", "Host memory and queues", _host(s), ()),
    ]  # fmt: skip


def _idle(s: ServingSummary) -> list[str]:
    if s.samples is None:
        return ["The duty-cycle table is not in this copy of the trace."]
    return [
        f"{_share(s.idle_sample_fraction)} of {fmt.count(s.samples)} samples are at exactly 0; "
        f"{_share(s.above_50pct_sample_fraction)} are above 50 %. The mean is "
        f"{quantity(s.utilization_mean_pct, '%', 1)}, the median {quantity(s.utilization_median_pct, '%')}."
    ]


def _memory(s: ServingSummary) -> list[str]:
    if s.memory_mean_idle_gb is None:
        return ["Memory while idle is unknown: it needs the duty-cycle and the memory table."]
    return [
        f"An idle sample holds {quantity(s.memory_mean_idle_gb, 'GB', 1)} on average, a sample above 50 % "
        f"{quantity(s.memory_mean_busy_gb, 'GB', 1)}: idle pods keep {_share(s.memory_idle_over_busy, digits=0)} of "
        f"what busy ones hold. {fmt.count(s.joined_samples)} samples have both a duty cycle and a memory value; "
        f"{fmt.count(s.memory_devices)} pods are in the memory table, {fmt.count(s.devices)} in the other."
    ]


def _devices(s: ServingSummary) -> list[str]:
    shares = s.device_idle_fraction_percentiles
    if shares is None:
        return ["The distribution over pods is unknown without the duty-cycle table."]
    return [
        f"Half of the pods are idle for at least {_share(shares['p50'])} of their samples, and a tenth for at least "
        f"{_share(shares['p90'])}. {fmt.count(s.devices_mostly_below_5pct)} of {fmt.count(s.devices)} pods spend more "
        f"than half of their samples below 5 %; the mean duty cycle is below 20 % for "
        f"{_share(s.devices_mean_below_20pct_fraction)} of them."
    ]


def _fleet(s: ServingSummary) -> list[str]:
    if s.idle_memory_fraction is None:
        return ["The fleet's idle memory is unknown: it needs the duty-cycle and the memory table."]
    return [
        f"Summed over the idle samples: {_share(s.idle_memory_fraction)} of the memory-time "
        f"({quantity(s.idle_memory_time_gb_h, 'GB h', 0)} of {quantity(s.memory_time_gb_h, 'GB h', 0)}). Summed over "
        f"pods, each pod's memory times its idle fraction: {_share(s.idle_memory_fraction_per_device)}. The first is "
        "exact; the second loses the link between when a pod is idle and what it holds then.",
        f"On average {quantity(s.mean_concurrently_idle_memory_tb, 'TB', 2)} are held idle at the same time.",
    ]


def _popularity(s: ServingSummary) -> list[str]:
    if s.base_models is None:
        return ["Popularity is unknown without the request table."]
    return [
        f"{fmt.count(s.base_models)} base models and {fmt.count(s.lora_adapters)} LoRA adapters are requested. The "
        f"most requested 5 % of the base models get {_share(s.popularity_top5pct_share)} of the requests; "
        f"the Gini coefficient is {fmt.number(s.popularity_gini, digits=3)}."
    ]


def _load(s: ServingSummary) -> list[str]:
    means = s.load_latency_mean_s or {}
    words = {"base_model": "a base model", "lora": "a LoRA adapter", "controlnet": "a ControlNet",
             "pipeline": "a whole pipeline"}  # fmt: skip
    parts = [f"{text} {quantity(means[key], 's', 2)}" for key, text in words.items() if means.get(key) is not None]
    if not parts:
        return ["Load latency is unknown without the latency tables."]
    return [
        f"Mean time to load: {', '.join(parts)}. That is the price of giving memory back and needing it again; "
        "nothing was published about it to compare with."
    ]


def _requests(s: ServingSummary) -> list[str]:
    if s.requests is None:
        return ["The requests are unknown: this copy of the trace lacks their table."]
    return [
        f"{fmt.count(s.requests)} requests, {fmt.count(s.requests_without_lora)} without a LoRA adapter and "
        f"{fmt.count(s.requests_with_lora)} with. Half of them take at most {quantity(s.exec_time_median_s, 's')}, "
        f"99 % at most {quantity(s.exec_time_p99_s, 's')}. Those of the most requested 5 % of the base models take "
        f"{quantity(s.exec_time_mean_hot_s, 's', 1)} on average, those of the others "
        f"{quantity(s.exec_time_mean_cold_s, 's', 1)}.",
        *_stages(s),
    ]


def _stages(s: ServingSummary) -> list[str]:
    if not s.stage_pairs:
        return []
    pairs = f"{fmt.count(s.stage_pairs)} samples of the same pod and time have a time of inference alone and end to end"
    if s.computation_share_median is not None:
        return [f"{pairs}. Half of them spend at least {_share(s.computation_share_median)} in inference."]
    return [
        f"{pairs}. In {_share(s.stage_pairs_reversed_fraction)} of them inference alone, which the end-to-end time "
        "includes by the documentation of the trace, takes longer. So the tables do not say how much of the latency is "
        f"computation. If they were exchanged, half of the samples would spend at least "
        f"{_share(s.computation_share_exchanged_median)} in inference."
    ]


def _host(s: ServingSummary) -> list[str]:
    stage = s.stage_latency_mean_s or {}
    return [
        f"Host memory in use: {_share(s.host_memory_mean_fraction)} of the pods' memory on average. Its values are "
        f"fractions up to {fmt.number(s.host_memory_max_fraction, digits=2)}, although the trace calls them percent.",
        f"Mean queue: {fmt.number(s.queue_length_mean, digits=2)} requests, "
        f"{quantity(stage.get('queue_time'), 's', 2)} of waiting. Mean time of inference alone "
        f"{quantity(stage.get('predict'), 's')}, end to end {quantity(stage.get('pipeline_inference'), 's')}; "
        "the two are different tables.",
    ]


RECIPES = (
    ("Idle sample", "Duty cycle exactly 0."),
    ("Sampling interval", "The median gap between consecutive samples of a pod."),
    ("Memory-time", "Memory of each joined sample x sampling interval, summed. GB are 1e9 bytes."),
    ("Idle memory-time, direct", "The same sum over the samples with duty cycle 0."),
    ("Idle memory-time, per pod", "Sum over pods of the pod's memory-time x its fraction of samples at 0."),
    ("Mean concurrently idle memory", "Memory of the idle samples, summed, by the number of sample times."),
    ("Percentiles", "Linear interpolation between neighbours; over pods, of each pod's fraction of samples at 0."),
    ("Gini coefficient", "G = sum((2i - n - 1) x_i) / (n sum(x_i)), requests per base model ascending."),
    (
        "Hot models",
        "The most requested 5 % of the base models, as for their popularity. The publication's own "
        "definition is not in the trace.",
    ),
    ("Share of computation", "Median of inference alone by end to end, over samples of the same pod and time."),
    ("Top 5 %", "Requests of the ceil(0.05 n) most requested base models, of all requests that name one."),
    trace_page.BORNE_OUT_RECIPE,
)
