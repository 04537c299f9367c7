"""``slurm-affinode whatif``: simulate the queue under another policy, or with more or freed GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import unwritable
from slurm_affinode.base.files import delivering
from slurm_affinode.base.text import counted, figure, percent, span
from slurm_affinode.cli.command import command
from slurm_affinode.cli.engine_options import engine_of, engine_options
from slurm_affinode.cli.options import (
    LogFile,
    NumberInRange,
    Span,
    Spans,
    When,
    config_options,
    dask_option,
    echo,
    json_option,
    print_json,
    print_table,
    progress,
    stages,
    warn,
    zone,
)
from slurm_affinode.traces import queue_logs
from slurm_affinode.whatif.policy import Backfill, Order, SchedulingPolicy, Times

if TYPE_CHECKING:
    from slurm_affinode.pipeline.whatif import Change, ClusterReplay
    from slurm_affinode.traces.job_log import LeftOut
    from slurm_affinode.whatif.phases import Deployment

_EPILOG = """\b
Examples:
  slurm-affinode whatif --since 30d --suspend-idle 15m          suspended when idle
  slurm-affinode whatif --since 30d --sweep --html whatif.html
  slurm-affinode whatif --since 30d --gpus +16 --limit-interactive 4h
  slurm-affinode whatif --trace swf:KTH-SP2-1996-2.swf.gz --capacity 100
  slurm-affinode whatif --trace swf:log.swf --order sjf --times last-two --json
  slurm-affinode whatif --trace swf:log.swf --times predicted
  slurm-affinode whatif --trace helios:HeliosData/data/Venus --backfill first-fit
  slurm-affinode whatif --trace site:trace/ --suspend-idle 15m
  slurm-affinode whatif --trace gentd26:cluster-trace-v2026-GenAI/ --pool-servers --suspend-idle 5m
  slurm-affinode whatif --trace azure:AzureLLMInferenceTrace_code.csv --split-phases
  slurm-affinode whatif --trace philly:philly_pollux.csv.gz --capacity 400 --order sjf-user \\
      --backfill first-fit --sample 2000 --seed 42 --arrivals 100
"""


_REQUESTS = ("gentd26", "azure")
"""Traces of requests to model servers."""
_SIMULATED = (
    "trace", "capacity", "order", "backfill", "times", "max_run", "sample", "seed", "arrivals", "since", "until",
    "suspend_idle", "mode", "sweep", "html", "idle_risk", "more_gpus", "one_pool", "limit_interactive", "partial",
    "dask", "validated",
)  # fmt: skip
"""Parameters about logs and a site's jobs, each of which has an influence on some of these."""
_ENGINE_DEFAULTS = {
    "kv_tokens": "1300000", "max_running": "256", "iteration_ms": "29.4", "request_us": "320", "prefill_us": "93",
}  # fmt: skip
"""``phases.LLAMA2_70B``, which is imported when it is used."""
_FIRST_TOKEN_S = 2.0
_BETWEEN_TOKENS_S = "0.2,0.1,0.05"
_WINDOWS = "5m,10m,15m,30m,1h,2h,4h"
_TYPICAL_S = 900.0
"""The page states the result for the window of the sweep that is closest to this, if --suspend-idle is not given."""


@command(epilog=_EPILOG)
@click.option(
    "--trace",
    type=LogFile(*queue_logs.READERS, *_REQUESTS),
    metavar="KIND:PATH",
    help="Simulate a log or trace, such as swf:FILE",
)
@click.option(
    "--capacity", type=click.IntRange(1), metavar="N",
    help="Set the processors or GPUs of the pool [default: those of the log, if it has them]",
)  # fmt: skip
@click.option("--order", type=click.Choice(get_args(Order)), default="fcfs", show_default=True, help="Order jobs so")
@click.option(
    "--backfill", type=click.Choice(get_args(Backfill)),
    help="Let jobs start before others that do not fit [default: easy; first-fit with --since]",
)  # fmt: skip
@click.option(
    "--times", type=click.Choice(get_args(Times)),
    help="Estimate run times so [default: requested; actual if the log has no requested times]",
)  # fmt: skip
@click.option(
    "--max-run", type=Span(), metavar="SPAN",
    help="Exclude jobs that ran for longer [default: 200000 s for philly, else none]",
)  # fmt: skip
@click.option("--sample", type=click.IntRange(1), metavar="N", help="Draw N jobs at random")
@click.option("--seed", type=int, default=42, show_default=True, metavar="S", help="Seed the drawing with S")
@click.option(
    "--arrivals", type=click.IntRange(1), metavar="N", help="Let N jobs arrive per minute, instead of as recorded"
)
@click.option(
    "--validate", "validated", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Compare with published figures; the logs are in DIR",
)  # fmt: skip
@click.option("--since", type=When(), metavar="TIME", help="Replay the site's GPU jobs from TIME on, such as 30d")
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End the replay at TIME")
@click.option("--suspend-idle", type=Span(), metavar="SPAN", help="Suspend jobs that are idle for SPAN")
@click.option(
    "--mode", type=click.Choice(["requeue", "inplace"]), default="requeue", show_default=True,
    help="Return GPUs of suspended jobs to the queue, or keep them allocated",
)  # fmt: skip
@click.option(
    "--sweep", type=Spans(), is_flag=False, flag_value=_WINDOWS, metavar="[SPAN,...]",
    help=f"Replay suspension for each of these idle times [default: {_WINDOWS}]",
)  # fmt: skip
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write a page with the result to FILE",
)  # fmt: skip
@click.option("--idle-risk", is_flag=True, help="Show returned GPU-hours by the predicted idle time of jobs")
@click.option("--gpus", "more_gpus", type=click.IntRange(0), default=0, metavar="+N", help="Add N GPUs")
@click.option("--one-pool", is_flag=True, help="Let each job use every GPU of its cluster")
@click.option("--limit-interactive", type=Span(), metavar="SPAN", help="End jobs of salloc and srun after SPAN")
@click.option("--pool-servers", is_flag=True, help="Let the model servers of a trace of requests share --capacity GPUs")
@click.option(
    "--warm", type=click.IntRange(0), metavar="N", help="Keep N sleeping servers in host memory [default: all]"
)
@click.option(
    "--tiers", is_flag=True, help="Compare LRU with eviction by cost, for servers in GPUs, host memory and storage"
)
@click.option("--split-phases", is_flag=True, help="Compare engines that do both with engines for prefill and decode")
@click.option(
    "--first-token", type=Span(), metavar="SPAN",
    help=f"Limit the time to first token of 99 % of the requests [default: {_FIRST_TOKEN_S:g}s]",
)  # fmt: skip
@click.option(
    "--between-tokens", type=Spans(), metavar="SPAN,...",
    help=f"Limit the mean time between their tokens, in s [default: {_BETWEEN_TOKENS_S}]",
)  # fmt: skip
@engine_options(_ENGINE_DEFAULTS)
@click.option(
    "--transfer-us", type=NumberInRange(0, 1_000_000), metavar="US",
    help="Time to move a token's KV cache to another engine [default: 6.6]",
)  # fmt: skip
@click.option(
    "--chunk-tokens", type=click.IntRange(1, 10**9), metavar="N",
    help="Compare engines that divide prompts: at most N tokens in an iteration, decoded and prefilled ones",
)  # fmt: skip
@click.option("--engine-gpus", type=click.IntRange(1, 4096), metavar="N", help="GPUs of an engine [default: 8]")
@click.option("--partial", is_flag=True, help="Simulate even if more than a tenth of the jobs is left out")
@dask_option
@json_option
@config_options
def whatif(
    *, config: Config, trace: tuple[str, Path] | None, capacity: int | None, order: Order, backfill: Backfill | None,
    times: Times | None, max_run: float | None, sample: int | None, seed: int, arrivals: int | None,
    validated: Path | None, since: datetime | None, until: datetime, suspend_idle: float | None,
    mode: str, more_gpus: int, idle_risk: bool,
    sweep: tuple[float, ...] | None, html: Path | None, one_pool: bool, limit_interactive: float | None, partial: bool,
    pool_servers: bool, warm: int | None, tiers: bool, dask: str | None, as_json: bool, **engine: Any,
) -> int:  # fmt: skip
    """Simulate the queue of a log of jobs on a pool of equal units, and report waits and slowdowns.

    --trace reads swf:FILE, philly:PATH, helios:PATH, acme:FILE, pai2020:DIR, pai2023:PATH, dlrm2025:PATH, spot2026:PATH
    and, of "export trace", site:DIR, as the commands of "trace" do.

    A data set of "export trace" has idle windows: with --suspend-idle, --sweep, --gpus or --html it is replayed as the
    site's own jobs are, on one pool.

    --trace gentd26:DIR has requests to model servers. With --pool-servers these share --capacity GPUs (without it
    several sizes are compared): servers that are idle for --suspend-idle sleep, as does an idle one whose GPU another
    one needs. With --tiers, one size and several sizes of host memory (--warm) are compared, with eviction from both by
    last use (lru) and by requests and load times (cost).

    --trace azure:PATH has requests with numbers of tokens. The fewest inference engines are determined that serve the
    busiest hour within --first-token and each of --between-tokens, by a queueing model with the parameters of an engine
    (defaults: Llama 2 70B on eight H100); with --split-phases also engines that only prefill or only decode, with
    --chunk-tokens also engines that divide prompts (vLLM's chunked prefill, --max-num-batched-tokens), and with
    --pool-servers, for a directory with a file for each service, also engines that these do not share.

    With --since, the site's own GPU jobs are replayed twice, as they were and with the changes that --suspend-idle,
    --gpus and --limit-interactive describe, from ingested accounting and GPU metrics.

    \b
    --backfill none       strict order: a job that does not fit holds up all others
    --backfill easy       first come, first served; the first job that does not fit
                          has a reservation, which the others may not delay.
                          --order is the order in which these others are tried:
                          fcfs is EASY, sjf is EASY-SJBF (shortest first),
                          sjf-user by the mean run time of the user
    --backfill conservative
                          each job that waits has a reservation, which others may
                          not delay; --order is the order in which reservations
                          are moved forward when a job ends before its estimate
    --backfill first-fit  each job that fits is started, without reservations
    --order fcfs          by submission
    --order sjf           by estimated run time (--times), then by place in the log
    --order sjf-user      by the mean run time of the user (philly: virtual cluster)
                          over the whole log, then by place in the log
    --order priority      by the priority of the log (spot2026, site) or of
                          accounting (--since), then by submission;
                          with easy, the job with the highest one has the reservation
    --times requested     the requested time
    --times actual        the run time itself: perfect knowledge
    --times last-two      the mean of the last two jobs of the user that have ended,
                          at most the requested time, and corrected to it once a
                          job runs for longer
    --times predicted     the run time that the best predictor of "predict" gives,
                          from jobs that had ended by the log, corrected likewise

    --times has no influence with --order fcfs or sjf-user and --backfill none or first-fit. Run times are cut at the
    requested time.

    --sample draws as PAI's simulator does: the first 10 N + 1 jobs of the log are shuffled by Python's random with the
    seed, and the first N taken. With --arrivals these arrive at the beginning of a minute, in the order of their
    submission.

    With --dask, the workers of a Dask cluster read the stored GPU metrics, which they need at the same path, and
    replay the queue for each of the idle times of --sweep.
    """
    if trace is not None and trace[0] == "azure":
        if any((capacity, suspend_idle, tiers, warm is not None)):
            raise click.UsageError("--capacity, --suspend-idle, --warm and --tiers have no influence on this trace")
        _reject_others("--trace azure:PATH", "trace")
        _size_engines(trace[1], engine, apart=pool_servers, as_json=as_json)
        return 0
    if any(value not in (None, False) for value in engine.values()):
        raise click.UsageError(
            "--split-phases, --chunk-tokens and the options of its engines and targets need --trace azure:PATH"
        )
    if pool_servers or (trace is not None and trace[0] == "gentd26"):
        if trace is None or trace[0] != "gentd26" or not pool_servers:
            raise click.UsageError(
                "--pool-servers needs --trace gentd26:DIR or azure:DIR, and gentd26 needs --pool-servers"
            )
        _reject_others("--pool-servers", "trace", "capacity", "suspend_idle")
        show = _show_tiers if tiers else _pool_servers
        show(trace[1], capacity, suspend_idle, warm, as_json=as_json)
        return 0
    if warm is not None or tiers:
        raise click.UsageError("--warm and --tiers need --pool-servers")
    if validated is not None:
        if dask:
            raise click.UsageError("--dask needs --since")
        _reject_others("--validate", "validated")
        return _validate(validated, as_json=as_json)
    if (trace is None) == (since is None):
        raise click.UsageError("give --trace KIND:PATH, such as swf:FILE, or --since TIME, or --validate DIR")
    if trace is None or (trace[0] == "site" and any((suspend_idle, more_gpus, sweep, html, idle_risk))):
        if trace is not None and any((limit_interactive, dask, order != "fcfs")):
            raise click.UsageError(
                "--limit-interactive, --dask and --order have no meaning for idle windows of a trace"
            )
        if backfill == "none" or order not in {"fcfs", "priority"} or any((capacity, max_run, sample, arrivals)):
            raise click.UsageError(
                "with --since, --order is fcfs or priority, "
                "and only --backfill easy, conservative or first-fit can be chosen"
            )
        if times == "last-two" or (times is not None and backfill not in ("easy", "conservative")):
            raise click.UsageError(
                "with --since, --times is requested, predicted or actual, with --backfill easy or conservative"
            )
        if option := _option_of("seed"):
            raise click.UsageError(f"{option} has no influence with --since, or idle windows of a trace")
        if suspend_idle is None and sweep and html is not None:
            suspend_idle = min(sweep, key=lambda window: abs(window - _TYPICAL_S))
        change = {
            "suspend_idle_s": suspend_idle, "more_gpus": more_gpus, "limit_interactive_s": limit_interactive,
            "backfill": backfill or "first-fit", "partial": partial, "windows_s": sweep or (), "one_pool": one_pool,
            "mode": mode, "times": times or "requested", "order": order,
            "idle_risk": idle_risk,
        }  # fmt: skip
        if trace is not None:
            _replay_trace(trace[1], change, html=html, as_json=as_json)
        else:
            _replay_site(config, since or until, until, change, dask=dask, html=html, as_json=as_json)
        return 0
    if any((suspend_idle, more_gpus, limit_interactive, sweep, html, one_pool, mode != "requeue", idle_risk, dask)):
        raise click.UsageError(
            "--suspend-idle, --mode, --gpus, --limit-interactive, --one-pool, --sweep, --html, --idle-risk and "
            "--dask need --since; with --trace site:DIR: --suspend-idle, --sweep, --gpus, --html, --idle-risk"
        )
    if option := _option_of("until"):
        raise click.UsageError(f"{option} has no influence with a log or trace")
    if sample is None and (option := _option_of("seed")):
        raise click.UsageError(f"{option} has no influence without --sample")
    _simulate_log(
        trace,
        capacity,
        (order, backfill or "easy", times),
        (max_run, sample, seed, arrivals),
        partial=partial,
        as_json=as_json,
    )
    return 0


def _option_of(*names: str) -> str | None:
    """Return the first option of these parameters that was given; ``None`` without one."""
    context = click.get_current_context()
    return next(
        (
            parameter.opts[0]
            for parameter in context.command.params
            if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        ),
        None,
    )


def _reject_others(where: str, *used: str) -> None:
    """Raise a usage error if an option of ``_SIMULATED`` was given that is not ``used``."""
    if option := _option_of(*(name for name in _SIMULATED if name not in used)):
        raise click.UsageError(f"{option} has no influence with {where}")


def _simulate_log(
    trace: tuple[str, Path], capacity: int | None, rules: tuple[Order, Backfill, Times | None],
    selected: tuple[float | None, int | None, int, int | None], *, partial: bool, as_json: bool,
) -> None:  # fmt: skip
    from slurm_affinode.traces import philly  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.traces.job_log import UNKNOWN  # noqa: PLC0415
    from slurm_affinode.whatif.figures import figures, head_of_line_wait  # noqa: PLC0415
    from slurm_affinode.whatif.simulation import simulate  # noqa: PLC0415
    from slurm_affinode.whatif.workload import Selection, prepare  # noqa: PLC0415

    kind, path = trace
    log = queue_logs.read(kind, path)
    capacity = capacity or log.capacity
    if capacity is None:
        raise click.UsageError("give --capacity N: the log does not have the size of the machine")
    order, backfill, times = rules
    if times is None:
        times = "actual" if (log.jobs["request_s"] == UNKNOWN).all() else "requested"
    policy = SchedulingPolicy(order, backfill, times)
    max_run, sample, seed, arrivals = selected
    longest_s = philly.LONGEST_S if max_run is None and kind == "philly" else max_run
    prepared = prepare(log, capacity, policy, Selection(longest_s, sample, seed, arrivals), partial=partial)
    workload, predictor = prepared.workload, None
    if policy.times == "predicted" and policy.estimates:
        from slurm_affinode.pipeline import prediction  # noqa: PLC0415 - only for predictions

        run_times = prediction.run_times(prediction.read_trace(kind, path))
        predictor = run_times.predictor
        workload = dataclasses.replace(workload, predicted=run_times.predicted[workload.place])
    with progress("jobs", total=len(workload), quiet=as_json) as advance:
        starts = simulate(workload, prepared.capacity, policy, advance)
    result = figures(workload, starts, prepared.capacity)
    blocked_s = float(head_of_line_wait(workload, starts, prepared.capacity).mean())
    wait_known = prepared.recorded_wait != UNKNOWN
    recorded = float(prepared.recorded_wait[wait_known].mean()) if wait_known.all() and arrivals is None else None
    if as_json:
        print_json({
            **dataclasses.asdict(result), "mean_head_of_line_wait_s": blocked_s, "recorded_mean_wait_s": recorded,
            "replayed_to_recorded": result.mean_wait_s / recorded if recorded else None, "trace": str(path),
            "capacity": capacity, "unit": log.unit, "order": order, "backfill": backfill, "times": times,
            "predictor": predictor,
            "sampled_from": prepared.sampled_from, "seed": None if sample is None else seed, "arrivals": arrivals,
            "left_out": [dataclasses.asdict(left_out) for left_out in prepared.left_out],
            "excluded": [dataclasses.asdict(excluded) for excluded in prepared.excluded],
        })  # fmt: skip
        return
    rows = [
        ("policy", str(policy) + (f" ({predictor})" if predictor else "")),
        ("capacity", counted(capacity, log.unit)),
        ("jobs", f"{result.jobs:,}"),
        ("mean wait", _seconds(result.mean_wait_s)),
        ("median wait", _seconds(result.median_wait_s)),
        ("95th percentile of the wait", _seconds(result.p95_wait_s)),
        ("of the mean wait behind others, with enough free", _seconds(blocked_s)),
        ("mean time to completion", _seconds(result.mean_jct_s)),
        ("mean bounded slowdown (10 s)", f"{result.mean_bounded_slowdown:,.4f}"),
        ("utilization", percent(result.utilization)),
        ("makespan", span(result.makespan_s)),
        ("total completion time", f"{result.total_completion_s / 3600:,.0f} h"),
        ("largest stretch", f"{result.max_stretch:,.1f}"),
    ]
    if recorded is not None:
        rows.append(("recorded mean wait", _seconds(recorded)))
        rows.append(("replayed / recorded", figure(result.mean_wait_s / recorded) if recorded else "unknown"))
    print_table(("figure", "value"), rows, right=("value",))
    _warn_left_out("left out", prepared.left_out, log.unit)
    _warn_left_out("excluded", prepared.excluded, log.unit)


def _pool_servers(
    path: Path, capacity: int | None, window_s: float | None, warm: int | None, *, as_json: bool
) -> None:  # fmt: skip
    from slurm_affinode.pipeline import server_pool  # noqa: PLC0415 - --help stays quick

    comparison = server_pool.compare(path, capacity, window_s, warm)
    if as_json:
        print_json(dataclasses.asdict(comparison))
        return
    headings = ("GPUs", "sleep after", "most awake", "GPU-hours awake", "wait mean", "wait p95", "hot", "warm", "cold",
                "wait for a wake", "wakes a day")  # fmt: skip
    print_table(
        headings,
        [(f"{row.gpus:,}", "" if row.window_s is None else span(row.window_s), f"{row.most_awake:,}",
          f"{row.gpu_hours_awake:,.0f}", _seconds(row.wait_mean_s), _seconds(row.wait_p95_s),
          percent(row.hot_share), percent(row.warm_share), percent(row.cold_share), percent(1 - row.hot_share),
          f"{row.wakes_per_day:,.1f}") for row in comparison.pools],
        title=f"{counted(comparison.servers, 'server')}, {counted(comparison.requests, 'request')} in "
        f"{span(comparison.span_s)}",
        right=headings,
        minor=("wait p95", "wait for a wake", "most awake", "cold", "warm", "hot", "wakes a day"),
    )  # fmt: skip
    echo()
    echo(f"A GPU for each server: {comparison.gpu_hours:,.0f} GPU-hours.")
    echo(f"A wake takes {span(comparison.wake_s)} from host memory, {span(comparison.load_s)} from storage.")
    echo("Published, of other systems and not computed here:", *(f"  {text}" for text in comparison.published))
    for note in comparison.notes:
        warn(f"left out: {note}")


def _show_tiers(path: Path, capacity: int | None, window_s: float | None, warm: int | None, *, as_json: bool) -> None:
    from slurm_affinode.pipeline import server_pool  # noqa: PLC0415 - --help stays quick

    comparison = server_pool.compare_tiers(path, capacity, window_s, warm)
    if as_json:
        print_json(dataclasses.asdict(comparison))
        return
    headings = ("warm servers", "eviction", "hot", "warm", "cold", "wake wait mean", "wake wait p95",
                "wait mean", "wakes a day")  # fmt: skip
    slept = "only for others" if comparison.window_s is None else f"after {span(comparison.window_s)}"
    print_table(
        headings,
        [(f"{row.warm:,}", row.eviction, percent(row.hot_share), percent(row.warm_share), percent(row.cold_share),
          f"{row.wake_wait_mean_s:.2f} s", _seconds(row.wake_wait_p95_s), _seconds(row.wait_mean_s),
          f"{row.wakes_per_day:,.1f}") for row in comparison.tiers],
        title=f"{counted(comparison.servers, 'server')} on {counted(comparison.gpus, 'GPU')}, "
        f"{counted(comparison.requests, 'request')} in {span(comparison.span_s)}; servers sleep {slept}",
        right=(headings[0], *headings[2:]), minor=("wait mean", "wake wait p95", "wakes a day"),
    )  # fmt: skip
    echo()
    echo(
        f"A wake takes {span(comparison.wake_s)} from host memory, {comparison.load_p5_s:.1f} to "
        f"{comparison.load_p95_s:.1f} s (mean {comparison.load_mean_s:.1f} s) from storage, by model."
    )
    echo("Published, of other systems and not computed here:", *(f"  {text}" for text in comparison.published))
    for note in comparison.notes:
        warn(f"left out: {note}")


def _size_engines(path: Path, options: Mapping[str, Any], *, apart: bool, as_json: bool) -> None:
    from slurm_affinode.pipeline import phase_split  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.whatif.phases import GPUS, LLAMA2_70B, TRANSFER_TOKEN_S, LatencyTarget  # noqa: PLC0415

    first_s = options["first_token"] or _FIRST_TOKEN_S
    between = options["between_tokens"] or Spans().convert(_BETWEEN_TOKENS_S, None, None)
    moved_us = options["transfer_us"]
    comparison = phase_split.compare(
        path, dataclasses.replace(engine_of(LLAMA2_70B, options), chunk_tokens=options["chunk_tokens"]),
        [LatencyTarget(first_s, limit) for limit in sorted(between, reverse=True)],
        gpus_per_engine=options["engine_gpus"] or GPUS,
        transfer_token_s=TRANSFER_TOKEN_S if moved_us is None else moved_us / 1e6, apart=apart,
        split=options["split_phases"],
    )  # fmt: skip
    if as_json:
        print_json(dataclasses.asdict(comparison))
        return
    rows = []
    for target in comparison.targets:
        limits = (_seconds(target.target.first_token_s), _milliseconds(target.target.between_tokens_s))
        deployments = [
            (f"own, {service.name}", deployment)
            for service, deployment in zip(comparison.services, target.apart or (), strict=False)
        ]
        if apart and target.apart is None:
            rows.append((*limits, "own", *["not reached"] * 2, *[""] * 6))
        rows += [(*limits, *_deployment_cells(name, deployment, comparison.gpus_per_engine))
                 for name, deployment in (*deployments, ("mixed", target.mixed),
                                          *([("chunked", target.chunked)] if options["chunk_tokens"] else []),
                                          *([("split", target.split)] if options["split_phases"] else []))]  # fmt: skip
    headings = ("first token", "between tokens", "engines for", "engines", "GPUs", "first token p99",
                "between tokens p99", "queued mean", "most waiting", "busy", "busy: prefill, decode")  # fmt: skip
    span_s = (comparison.until - comparison.since).total_seconds()
    print_table(
        headings, rows,
        title=f"{counted(sum(service.requests for service in comparison.services), 'request')} in {span(span_s)}: "
        f"the fewest engines that serve {percent(comparison.quantile)} of them within the limits",
        right=(*headings[:2], *headings[3:]),
        minor=("most waiting", "queued mean", "busy", "busy: prefill, decode", "engines"),
    )  # fmt: skip
    model = comparison.engine
    echo()
    echo(
        f"Modeled engine: {counted(comparison.gpus_per_engine, 'GPU')}, {model.kv_tokens:,} KV tokens; an iteration "
        f"takes {model.base_s * 1e3:g} ms, {model.per_request_s * 1e6:g} us per request in the batch and "
        f"{model.per_prefill_token_s * 1e6:g} us per token of a prompt."
    )
    if model.chunk_tokens is None:
        echo("A prompt is prefilled in a single iteration, not in chunks, and prefixes are not cached.")
    else:
        echo(
            f"Chunked: an iteration decodes and prefills at most {counted(model.chunk_tokens, 'token')}. The other "
            "engines prefill a prompt in a single iteration. Prefixes are not cached."
        )
    if options["split_phases"]:
        echo(f"A KV cache moves in {comparison.transfer_token_s * 1e6:.3g} us per token.")
    echo("Published, of other systems and not computed here:", *(f"  {text}" for text in comparison.published))
    for note in comparison.notes:
        warn(f"left out: {note}")


def _deployment_cells(name: str, deployment: Deployment | None, gpus: int) -> tuple[str, ...]:
    if deployment is None:
        return (name, "not reached", "not reached", *[""] * 6)
    both = deployment.prefill_engines is None
    engines = (
        f"{deployment.engines:,}"
        if both
        else f"{deployment.prefill_engines:,} + {deployment.engines - (deployment.prefill_engines or 0):,}"
    )
    return (
        name, engines, f"{deployment.engines * gpus:,}", _seconds(deployment.first_token_p99_s),
        _milliseconds(deployment.between_tokens_p99_s), _milliseconds(deployment.queued_mean_s),
        f"{deployment.waiting_max:,}", percent(deployment.busy),
        "" if deployment.prefill_busy is None or deployment.decode_busy is None
        else f"{percent(deployment.prefill_busy)}, {percent(deployment.decode_busy)}",
    )  # fmt: skip


def _milliseconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value * 1e3:,.0f} ms"


def _warn_left_out(verb: str, reasons: Iterable[LeftOut], unit: str) -> None:
    for left_out in reasons:
        examples = f": {', '.join(left_out.examples)}{', ...' if left_out.jobs > len(left_out.examples) else ''}"
        share = f"{percent(left_out.share)} of the {unit}-hours"
        jobs = counted(left_out.jobs, "job")
        warn(f"{verb}: {jobs} {left_out.reason} ({share}){examples if left_out.examples else ''}")


_WORDS = ("order", "backfill", "times")


def _validate(directory: Path, *, as_json: bool) -> int:
    """Print the comparison; return 1 if a figure differs by more than the tolerance."""
    from slurm_affinode.whatif import validation  # noqa: PLC0415 - --help stays quick

    with progress("simulations", total=len(validation.cases()), quiet=as_json) as advance:
        compared = []
        for row in validation.validate(directory):
            compared.append(row)
            advance(1)
    missed = sum(row.difference > validation.TOLERANCE for row in compared)
    if as_json:
        print_json({"rows": [{**dataclasses.asdict(row), "difference": row.difference} for row in compared],
                    "tolerance": validation.TOLERANCE, "missed": missed})  # fmt: skip
        return int(missed > 0)
    for log, title in (("kth", "KTH-SP2"), ("philly", "Philly")):
        headings, cells = validation.table([row for row in compared if row.log == log])
        print_table(headings, cells, title=title, right=[name for name in headings if name not in _WORDS],
                    minor=("jobs", "times"))  # fmt: skip
        echo()
    worst = max(row.difference for row in compared)
    echo(f"Largest difference: {worst:.1e}" + (f"; {missed} above {validation.TOLERANCE:.0%}" if missed else ""))
    return int(missed > 0)


def _replay_site(
    config: Config, since: datetime, until: datetime, changes: Mapping[str, Any], *, dask: str | None,
    html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from slurm_affinode.analysis.result import WasteQuery  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.cli.folding import spreading  # noqa: PLC0415
    from slurm_affinode.pipeline import report  # noqa: PLC0415
    from slurm_affinode.pipeline.whatif import Change, replay_site  # noqa: PLC0415

    if until <= since:
        raise click.UsageError("the interval ends before it begins: choose --since before --until")
    query = WasteQuery(since, until, thresholds=report.thresholds(config), zone=zone())
    with stages(quiet=as_json) as step, spreading(dask, config) as spread_over:
        change = Change(**changes)
        replays = replay_site(config, query, change, step=step, spreading=spread_over)
    _show_replays(replays, change, (since, until), html, {}, as_json=as_json)


def _replay_trace(path: Path, changes: Mapping[str, Any], *, html: Path | None, as_json: bool) -> None:
    from slurm_affinode.pipeline import prediction  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.pipeline.whatif import Change, replay_trace  # noqa: PLC0415
    from slurm_affinode.traces import site_trace  # noqa: PLC0415

    with stages(quiet=as_json) as step:
        step("reading the trace")
        trace = site_trace.read(path)
        change = Change(**changes)
        predicted = risk = None
        if change.times == "predicted" or change.idle_risk:
            step("predicting")
            source = prediction.read_trace("site", path)
            predicted = prediction.run_times(source) if change.times == "predicted" else None
            if change.idle_risk:
                idle_risk = prediction.idle_risk(source)
                risk = dataclasses.replace(idle_risk, predicted_pct=idle_risk.predicted_pct[source.positions])
        step("replaying")
        replay = replay_trace(trace, change, predicted, risk)
    idle = site_trace.idle_figures(trace)
    idle_figures = {"measured_jobs": idle.measured_jobs, "unknown_gpu_hours": idle.unknown_gpu_hours}
    interval = trace.interval
    _show_replays([replay], change, interval, html, idle_figures, as_json=as_json)
    if idle.measured_jobs < trace.jobs.height:
        warn(f"{counted(trace.jobs.height - idle.measured_jobs, 'job')} with {idle.unknown_gpu_hours:,.0f} GPU-hours "
             "without samples of all GPUs: their idle time is unknown, and they are never suspended")  # fmt: skip


def _show_replays(
    replays: list[ClusterReplay], change: Change, interval: tuple[datetime, datetime], html: Path | None,
    more: Mapping[str, Any], *, as_json: bool,
) -> None:  # fmt: skip
    since, until = interval
    if html is not None:
        from slurm_affinode.pipeline import whatif_page  # noqa: PLC0415

        page = whatif_page.html(replays, change, since, until, zone())
        try:
            with delivering(html) as target:
                target.write_text(page, encoding="utf-8")
        except OSError as error:
            raise unwritable(html, error) from error
    if as_json:
        print_json({
            "since": since, "until": until, "suspend_idle_s": change.suspend_idle_s, "more_gpus": change.more_gpus,
            "limit_interactive_s": change.limit_interactive_s, **more,
            "clusters": [dataclasses.asdict(replay) for replay in replays],
        })  # fmt: skip
        return
    for replay in replays:
        _show_replay(replay, change.more_gpus)
    if html is not None:
        echo("", f"page  {html}")


def _show_replay(replay: ClusterReplay, more_gpus: int) -> None:
    added = f" (+{more_gpus:,} with the change)" if more_gpus else ""
    wake = "" if replay.wake_wait_mean_s is None else f", each after a mean wait of {span(replay.wake_wait_mean_s)}"
    print_table(("figure", "value"), [
        ("policy", replay.policy + ("" if replay.predictor is None else f" ({replay.predictor})")),
        ("mode", replay.mode),
        ("GPUs", f"{replay.gpus:,}{added}"),
        ("jobs", f"{replay.jobs:,}"),
        ("GPU-hours returned", _with_interval(replay.gpu_hours_returned, replay.gpu_hours_returned_interval, "h")),
        ("GPU-hours of these that others used", f"{replay.gpu_hours_used:,.1f} h"),
        ("mean wait saved", _with_interval(replay.saved_wait_mean_s, replay.saved_wait_interval_s, "s")),
        ("replayed / recorded mean wait", _ratio(replay.replayed_to_recorded)),
        ("jobs that start earlier, later", f"{replay.earlier:,}, {replay.later:,}"),
        ("jobs that end per day",
         f"{replay.throughput_before_per_day:,.1f}, then {replay.throughput_after_per_day:,.1f}"),
        ("mean wait behind others, with enough GPUs free",
         f"{span(replay.head_of_line_before_mean_s)}, then {span(replay.head_of_line_after_mean_s)}"),
        ("suspended jobs", f"{replay.suspended_jobs:,}"),
        ("wakes per day", f"{replay.wakes_per_day:,.1f}{wake}"),
        ("suspension, restore", f"{span(replay.dump_s)}, {span(replay.restore_s)} ({replay.costs_from})"),
        ("interactive jobs ended by the limit", f"{replay.interactive:,}"),
    ], title=replay.cluster)  # fmt: skip
    echo()
    headings = ("partition", "jobs", "recorded", "mean", "median", "p95", "mean then", "median then", "p95 then")
    print_table(
        headings,
        [("all" if row.partition is None else row.partition or "unknown", f"{row.jobs:,}",
          *(span(value) for value in (row.recorded_mean_s, row.before_mean_s, row.before_median_s, row.before_p95_s,
                                      row.after_mean_s, row.after_median_s, row.after_p95_s))) for row in replay.waits],
        title="Waits: recorded mean; replayed as it was; replayed with the change", right=headings[1:],
        minor=("p95", "p95 then", "median", "median then", "recorded"),
    )  # fmt: skip
    if replay.idle_risk:
        echo()
        _show_idle_risk(replay)
    if len(replay.pools) > 1:
        echo()
        _show_pools(replay)
    if replay.sweep:
        echo()
        columns = ("idle time", "GPU-hours returned", "used by others", "wakes per day", "suspended jobs",
                   "mean wait saved")  # fmt: skip
        print_table(
            columns,
            [(span(gain.suspend_idle_s or 0), _with_range(gain.gpu_hours_returned, gain.gpu_hours_returned_interval),
              f"{gain.gpu_hours_used:,.1f}", f"{gain.wakes_per_day:,.1f}", f"{gain.suspended_jobs:,}",
              _with_range(gain.saved_wait_mean_s, gain.saved_wait_interval_s) + " s") for gain in replay.sweep],
            title="Idle time before a suspension (95 % intervals: bootstrap of days)", right=columns,
            minor=("suspended jobs", "wakes per day"),
        )  # fmt: skip
    for reason, number in replay.left_out.items():
        warn(f"{replay.cluster}: left out: {counted(number, 'job')} {reason}")


def _show_idle_risk(replay: ClusterReplay) -> None:
    from slurm_affinode.pipeline.whatif import RISK_BOUNDS_PCT  # noqa: PLC0415 - --help stays quick

    above = dict(zip(RISK_BOUNDS_PCT, (*RISK_BOUNDS_PCT[1:], None), strict=True))

    def name(least: float | None) -> str:
        if least is None:
            return "unknown"
        most = above[least]
        return (
            f"{least:g} % or more" if most is None else f"below {most:g} %" if not least else f"{least:g} to {most:g} %"
        )

    headings = ("predicted idle time", "jobs", "GPU-hours", "idle GPU-hours", "idle share", "GPU-hours returned")
    print_table(
        headings,
        [(name(row.least_pct), f"{row.jobs:,}", f"{row.gpu_hours:,.1f} h", f"{row.idle_gpu_hours:,.1f} h",
          percent(row.idle_gpu_hours / row.gpu_hours), f"{row.gpu_hours_returned:,.1f} h") for row in replay.idle_risk],
        title=f"By the idle time that is predicted at the submission ({replay.idle_predictor})", right=headings[1:],
        minor=("idle share", "GPU-hours"),
    )  # fmt: skip


def _show_pools(replay: ClusterReplay) -> None:
    columns = ("partitions", "GPU models", "nodes", "GPUs", "jobs", "recorded", "mean", "mean then")
    rows = []
    for pool in replay.pools:
        means = (pool.recorded_mean_s, pool.before_mean_s, pool.after_mean_s)
        rows.append((
            ", ".join(name or "unknown" for name in pool.partitions), ", ".join(pool.models) or "unknown",
            f"{pool.nodes:,}", f"{pool.gpus:,}", f"{pool.jobs:,}",
            *("" if value is None else span(value) for value in means),
        ))  # fmt: skip
    print_table(columns, rows, title="Pools: jobs that compete for the same GPUs", right=columns[2:],
                minor=("nodes", "recorded", "GPU models", "jobs"))  # fmt: skip


def _ratio(value: float | None) -> str:
    return "unknown: no job waited" if value is None else figure(value)


def _with_interval(value: float, interval: tuple[float, float] | None, unit: str) -> str:
    if interval is None:
        return f"{value:,.1f} {unit}"
    return f"{value:,.1f} {unit} ({interval[0]:,.1f} to {interval[1]:,.1f}, bootstrap of days)"


def _with_range(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:,.1f}" + ("" if interval is None else f" ({interval[0]:,.1f} to {interval[1]:,.1f})")


def _seconds(value: float) -> str:
    return f"{value:,.1f} s"
