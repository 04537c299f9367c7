"""A week with four engines, for tests of pages: overloaded, idle with full GPUs, healthy, and one that says little."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from slurm_affinode.engines.diagnosis.examination import Fleet, examine_all
from slurm_affinode.engines.diagnosis.timeline import timeline
from slurm_affinode.engines.diagnosis.usage import ServerReport, usage
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.metrics.schema import SAMPLES as GPU_SAMPLES

START = datetime(2026, 11, 3, 8, tzinfo=UTC)
STEP_S = 15


def engine(
    address: str, rows: Sequence[dict[str, Any]], *, start: datetime = START, **identity: str | None
) -> pl.DataFrame:
    """Return samples of an engine, one row every 15 s; metrics that a row lacks are unknown."""
    named = {"cluster": "alpha", "node": address.partition(":")[0], "address": address, "engine": "vllm"} | identity
    whole = [
        {**dict.fromkeys(SAMPLES), **named, "time": start + timedelta(seconds=STEP_S * place), **row}
        for place, row in enumerate(rows)
    ]
    return pl.DataFrame(whole, schema=SAMPLES)


def idle(minutes: int, **values: float) -> list[dict[str, Any]]:
    """Return rows of an engine without requests."""
    resting = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "generation_tokens": 500.0, "finished": 20.0}
    return [{**resting, **values} for _ in range(minutes * 60 // STEP_S)]


def serving(count: int = 80) -> list[dict[str, Any]]:
    """Return rows of a healthy engine: two requests run, none waits."""
    return [
        {"running": 2.0, "waiting": 0.0, "kv_usage": 0.2, "preemptions": 0.0, "generation_tokens": 900.0 * i,
         "prompt_tokens": 300.0 * i, "finished": 3.0 * i, "failed": 1.0, "rejected": 0.0}
        for i in range(count)
    ]  # fmt: skip


def overloaded(count: int = 80) -> list[dict[str, Any]]:
    """Return rows of an engine with a queue that grows by 30 requests between scrapes."""
    return [
        {"running": 8.0, "waiting": 30.0 * max(0, i - 20), "kv_usage": 0.3 if i < 20 else 0.99, "preemptions": 0.0,
         "generation_tokens": 9000.0 * i, "prompt_tokens": 3000.0 * i, "finished": 30.0 * i}
        for i in range(count)
    ]  # fmt: skip


def gpus(uuid: str, minutes: int, *, used_mib: float, util_pct: float, power_w: float) -> pl.DataFrame:
    """Return samples of a GPU of 80,000 MiB, one every 30 s."""
    rows = [
        {**dict.fromkeys(GPU_SAMPLES), "cluster": "alpha", "node": "n1", "uuid": uuid, "index": 0,
         "time": START + timedelta(seconds=30 * i), "fb_used_mib": used_mib, "fb_total_mib": 80_000.0,
         "util_pct": util_pct, "power_w": power_w}
        for i in range(minutes * 2)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=GPU_SAMPLES)


def server_report(names: Sequence[str] = (), *, timelines: int = 15, note: str = "") -> ServerReport:
    """Return the engines of the week, diagnosed; ``names`` are used for models, jobs, users and addresses."""

    def name(place: int, usual: str) -> str:
        return names[place % len(names)] if names else usual

    samples = [
        engine("busy:8000", overloaded(), model=name(0, "llama-70b"), job=name(1, "4711"), user=name(2, "ann"),
               gpus="GPU-1,GPU-2"),
        engine(name(3, "lazy:8000"), idle(30), model=name(4, "qwen-7b"), job=name(5, "4712"), user=name(6, "bob"),
               gpus="GPU-3"),
        engine("fine:8000", serving(), model=name(7, "mistral"), job="4713", user="ann", gpus="GPU-4"),
        engine("mute:8080", [{} for _ in range(40)], engine="llamacpp", model=name(8, "tiny")),
    ]  # fmt: skip
    result = gpus("GPU-3", 30, used_mib=78_000.0, util_pct=0.0, power_w=70.0)
    order = [
        (usage(item.health, item.series), timeline(item.samples, item.gpus, item.health.since, item.health.until))
        for item in examine_all(pl.concat(samples).lazy(), Fleet(gpus=result.lazy()))
    ]
    order.sort(key=lambda pair: pair[0].urgency)
    return ServerReport(tuple(used for used, _ in order), tuple(frame for _, frame in order)[:timelines], note)
