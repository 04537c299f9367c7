"""Inference engines for a trace of requests: together or by phase, and for each service or for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import counted, percent
from slurm_affinode.pipeline.server_pool import PUBLISHED
from slurm_affinode.traces import azure_llm
from slurm_affinode.traces.engine_model import EngineModel
from slurm_affinode.traces.requests import busiest_span
from slurm_affinode.whatif.phases import (
    QUANTILE,
    Deployment,
    LatencyTarget,
    RequestArrays,
    fewest_mixed,
    fewest_split,
)


@dataclass(frozen=True, slots=True)
class ServiceRequests:
    """Requests of a service in the simulated time."""

    name: str
    requests: int


@dataclass(frozen=True, slots=True)
class TargetComparison:
    """The fewest engines for one target; ``None``: not reached, or not requested."""

    target: LatencyTarget
    apart: tuple[Deployment, ...] | None
    """Engines of each service that do both."""
    mixed: Deployment | None
    """Engines that all services share and that do both."""
    split: Deployment | None
    """Engines that all services share, and that only prefill or only decode."""
    chunked: Deployment | None
    """Engines that all services share and that do both, with prompts in chunks."""


@dataclass(frozen=True, slots=True)
class PhaseComparison:
    """Engines for the busiest hour of a trace of requests."""

    since: datetime
    until: datetime
    services: tuple[ServiceRequests, ...]
    engine: EngineModel
    """``chunk_tokens`` is that of ``chunked``: the other engines do not divide prompts."""
    gpus_per_engine: int
    transfer_token_s: float
    quantile: float
    """Share of the requests for which the targets hold."""
    targets: tuple[TargetComparison, ...]
    published: tuple[str, ...]
    notes: tuple[str, ...]


def compare(
    path: Path, engine: EngineModel, targets: Sequence[LatencyTarget], *, gpus_per_engine: int,
    transfer_token_s: float, apart: bool, split: bool,
) -> PhaseComparison:  # fmt: skip
    """Return the fewest engines that serve the hour with the most tokens of a trace within each target.

    Each file of a directory is a service. ``apart``: also with engines for each service. ``split``: also with engines
    that only prefill or only decode. With ``engine.chunk_tokens`` also with engines that divide prompts. Raises
    ``InputError`` for a trace that cannot be read, for ``apart`` if there is a single service, and if more requests
    than a target may miss fit into no engine.
    """
    traces = [azure_llm.read(file) for file in azure_llm.files([path])]
    merged = pl.concat(
        trace.requests.with_columns(pl.lit(number).alias("service")) for number, trace in enumerate(traces)
    ).sort("time", maintain_order=True)
    part = busiest_span(merged)
    origin = part["time"][0]
    tables = part.partition_by("service", as_dict=True)
    present = [(trace.name, tables[number,]) for number, trace in enumerate(traces) if (number,) in tables]
    if apart and len(present) < 2:
        raise InputError(
            "the busiest hour has requests of a single service, which has no other one to share engines with",
            where=str(path), hint="--pool-servers needs a directory with a file for each service, of the same hour",
        )  # fmt: skip
    whole = _arrays(part, origin)
    services = [_arrays(table, origin) for _, table in present]
    for each in (whole, *(services if apart else ())):
        _require_room(each, engine, path)
    undivided = replace(engine, chunk_tokens=None)
    alone = [fewest_mixed(service, undivided, targets) for service in services] if apart else []
    mixed = fewest_mixed(whole, undivided, targets)
    chunked = [None] * len(targets) if engine.chunk_tokens is None else fewest_mixed(whole, engine, targets)
    by_phase = fewest_split(whole, engine, targets, transfer_token_s) if split else [None] * len(targets)
    absent = [
        f"{trace.name} has no request in the busiest hour" for number, trace in enumerate(traces)
        if (number,) not in tables
    ]  # fmt: skip
    large = _too_large(whole, engine)
    if large:
        absent.append(f"{counted(large, 'request')} that need more than the KV cache of an engine")
    return PhaseComparison(
        since=origin,
        until=part["time"][-1],
        services=tuple(ServiceRequests(name, table.height) for name, table in present),
        engine=engine,
        gpus_per_engine=gpus_per_engine,
        transfer_token_s=transfer_token_s,
        quantile=QUANTILE,
        targets=tuple(
            TargetComparison(
                target, _all_known([row[number] for row in alone]), mixed[number], by_phase[number], chunked[number]
            )
            for number, target in enumerate(targets)
        ),
        published=PUBLISHED,
        notes=(*(problem for trace in traces for problem in trace.problems), *absent),
    )


def _too_large(requests: RequestArrays, engine: EngineModel) -> int:
    return int((~engine.fits(requests.context + requests.generated)).sum())


def _require_room(requests: RequestArrays, engine: EngineModel, path: Path) -> None:
    count, large = len(requests.arrival_s), _too_large(requests, engine)
    if large > (1 - QUANTILE) * count:
        raise InputError(
            f"{large:,} of {counted(count, 'request')} need more than the KV cache of an engine "
            f"({engine.kv_tokens:,} tokens), so that no number of engines serves {percent(QUANTILE)} of them",
            where=str(path), hint="set the cache of a larger engine: --kv-tokens N",
        )  # fmt: skip


def _all_known(deployments: Sequence[Deployment | None]) -> tuple[Deployment, ...] | None:
    usable = tuple(deployment for deployment in deployments if deployment is not None)
    return usable if usable and len(usable) == len(deployments) else None


def _arrays(requests: pl.DataFrame, origin: datetime) -> RequestArrays:
    seconds = (requests["time"] - origin).dt.total_microseconds().to_numpy() / 1e6
    return RequestArrays(seconds, requests["context"].to_numpy(), requests["generated"].to_numpy())
