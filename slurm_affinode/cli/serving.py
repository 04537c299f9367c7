"""``slurm-affinode serving``: model servers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, TypeVar

import click

from slurm_affinode.base import process
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.text import figure, percent, size, span
from slurm_affinode.cli.command import LazyGroup, command
from slurm_affinode.cli.folding import spreading
from slurm_affinode.cli.options import (
    Span,
    When,
    clock,
    config_options,
    dask_option,
    echo,
    json_option,
    print_json,
    print_table,
    progress,
    prometheus_options,
    warn,
    zone,
)
from slurm_affinode.engines.crashes.triage import MEMORIES, CrashTriage, LastMetrics
from slurm_affinode.engines.tuning import TuningFacts
from slurm_affinode.model.finding import Evidence, plain
from slurm_affinode.model.serving import BY_SEVERITY, LOOPBACK, Diagnosis, EngineHealth
from slurm_affinode.pipeline import servers
from slurm_affinode.pipeline import triage as pipeline
from slurm_affinode.pipeline.servers import ServerQuery, TunedEngine
from slurm_affinode.pipeline.triage import is_job, scan_logs
from slurm_affinode.report.output import write_files

_COMMANDS = {
    "list": ("slurm_affinode.cli.serving:list_", "List engines and their problems"),
    "explain": ("slurm_affinode.cli.serving:explain", "Show the diagnoses of engines with their evidence"),
    "tune": ("slurm_affinode.cli.serving:tune", "Recommend settings of an engine, with the figures behind them"),
    "triage": ("slurm_affinode.cli.serving:triage", "Find out why a job failed, from its logs and accounting"),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def serving() -> None:
    """Diagnose model servers: inference engines in Slurm jobs."""


F = TypeVar("F", bound=Callable[..., Any])


def period_options(function: F) -> F:
    """Add the period and the filters of the commands that diagnose stored samples."""
    options = [
        click.option("--since", type=When(), metavar="TIME", help="Begin at TIME [default: 1d before the end]"),
        click.option("--until", type=When(), metavar="TIME", help="End before TIME [default: the last sample]"),
        click.option("--cluster", "clusters", multiple=True, metavar="NAME", help="Select a cluster"),
        click.option("--node", "-w", "nodes", multiple=True, metavar="NAME", help="Select a node"),
        click.option("--user", "-u", "users", multiple=True, metavar="NAME", help="Select a user"),
        click.option(
            "--engine",
            "engines",
            multiple=True,
            metavar="NAME",
            help="Select an engine: vllm, sglang, tgi, triton, llamacpp",
        ),
        click.option(
            "--live",
            is_flag=True,
            help="Read the last 30 minutes from Prometheus, in place of stored samples",
        ),
    ]
    return functools.reduce(lambda command, option: option(command), reversed(options), function)


def _query_of(target: str, filters: dict[str, Any]) -> ServerQuery:
    """Return the query for the engines of a job, or for those at an address."""
    query = ServerQuery(**filters)
    return replace(query, jobs=(target,)) if is_job(target) else replace(query, addresses=(target,))


def _samples(config: Config, query: ServerQuery, *, live: bool) -> AbstractContextManager[tuple[Config, ServerQuery]]:
    """Return a context with the configuration and the query for the stored samples, or for those of Prometheus."""
    if not live:
        return nullcontext((config, query))
    if config.prometheus.url is None:
        raise click.UsageError("--live needs a Prometheus server: give --prometheus URL, or set prometheus.url")
    return servers.live(config, query, datetime.now(UTC), warned=warn)


_LIST_EPILOG = """\b
Examples:
  slurm-affinode serving list                   engines with samples on the last day, problems first
  slurm-affinode serving list --since 7d --user alice --json
  slurm-affinode serving list --live            the last 30 minutes, as in Prometheus

\b
Exit status: 0 no problem, 1 an engine has a problem at the end of the period, 2 invalid input or no samples,
  3 Prometheus does not respond.
"""


@command("list", epilog=_LIST_EPILOG)
@config_options
@prometheus_options
@period_options
@dask_option
@json_option
def list_(*, config: Config, live: bool, with_prometheus: bool, as_json: bool, dask: str | None, **query: Any) -> int:
    """List engines with their state at the end of the period and the worst one in it.

    Diagnoses the samples that `ingest serving` has stored, or with --live or --prometheus those of Prometheus, together
    with GPU samples where these are known. Nothing is stored. With --dask, the workers of a Dask cluster examine stored
    samples, which they need at the same path.
    """
    if dask and (live or with_prometheus):
        raise click.UsageError("--dask is for stored samples, and --live and --prometheus replace them")
    with (
        _samples(config, ServerQuery(**query), live=live or with_prometheus) as (store, period),
        progress("diagnose engines", total=None, quiet=as_json) as advance,
        spreading(dask, config) as spread_over,
    ):
        examined = servers.find(store, period, advance=advance, spreading=spread_over)
    engines = sorted(examined.engines, key=_urgency)
    if as_json:
        print_json(
            {"since": examined.since, "until": examined.until, "engines": [_as_json(engine) for engine in engines]}
        )
    else:
        rows = [_row(engine, examined.until) for engine in engines]
        if rows:
            print_table(
                ("engine", "model", "address", "job", "user", "now", "since", "worst"),
                rows,
                whole=("now", "worst"),
                minor=("engine", "since", "user", "model", "job", "now"),
            )
        else:
            echo("no engine matches")
        echo("", f"Examined: {clock(examined.since)} to {clock(examined.until)}")
        echo("Evidence: slurm-affinode serving explain ADDRESS")
    return 1 if any(_problem(engine) for engine in engines) else 0


_EXPLAIN_EPILOG = """\b
Examples:
  slurm-affinode serving explain 4711                 the engines of a job
  slurm-affinode serving explain gpu01:8000 --since 2d
  slurm-affinode serving explain 4711 --live --prometheus http://prometheus:9090

\b
Exit status: 0 done, 1 no engine matches, 2 invalid input or no samples, 3 Prometheus does not respond.
"""


@command(epilog=_EXPLAIN_EPILOG)
@config_options
@prometheus_options
@click.argument("target", metavar="JOBID|ADDRESS")
@period_options
@click.option(
    "--all", "everything", is_flag=True, help="Show the evidence of every diagnosis, not only of the problems"
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help="Read this log of the engine: memory that ran out; may be repeated",
)
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with charts to FILE",
)
@json_option
def explain(
    *, config: Config, target: str, everything: bool, logs: tuple[str, ...], page: Path | None, live: bool,
    with_prometheus: bool, as_json: bool, **query: Any,
) -> int:  # fmt: skip
    """Show the diagnoses of engines over time, with evidence, rule, confidence and advice.

    ADDRESS is the host and port of the metrics, as `serving list` shows it.
    """
    selection = _query_of(target, query)
    with _samples(config, selection, live=live or with_prometheus) as (store, period):
        examined = servers.find(store, period, timelines=page is not None, logs=scan_logs(logs))
    if page is not None and examined.engines:
        from slurm_affinode.report import servers_page  # noqa: PLC0415 - most calls need no page

        text = servers_page.html(list(zip(examined.engines, examined.timelines, strict=True)), zone())
        write_files(page.parent, {page.name: text.encode()})
    if as_json:
        engines = [_as_json(engine) for engine in examined.engines]
        print_json({"since": examined.since, "until": examined.until, "engines": engines})
        return 0 if examined.engines else 1
    if not examined.engines:
        warn(f"slurm-affinode: no samples of {target} between {clock(examined.since)} and {clock(examined.until)}")
        return 1
    for place, engine in enumerate(examined.engines):
        if place:
            echo()
        _explain_engine(engine, everything=everything)
    return 0


def _as_json(health: EngineHealth) -> dict[str, Any]:
    row: dict[str, Any] = plain(health)
    return {
        **row,
        "gpus": row["gpus"] or None,  # those of an engine are unknown, not none
        "current": [diagnosis.kind for diagnosis in health.current],
        "diagnoses": [diagnosis.as_json() for diagnosis in health.diagnoses],
    }


def _problem(health: EngineHealth) -> bool:
    return any(diagnosis.severity != "none" for diagnosis in health.current)


def _worst(diagnoses: Sequence[Diagnosis]) -> Diagnosis | None:
    return min(diagnoses, key=lambda diagnosis: (BY_SEVERITY.index(diagnosis.severity), diagnosis.since), default=None)


def _urgency(health: EngineHealth) -> tuple[int, str, str]:
    now = _worst(health.current)
    return (
        len(BY_SEVERITY) if now is None else BY_SEVERITY.index(now.severity),
        health.key.node or "",
        health.key.address,
    )


def _row(health: EngineHealth, until: datetime) -> tuple[str, ...]:
    now, worst = _worst(health.current), _worst(health.diagnoses)
    return (
        health.key.engine, health.key.model or "", _address(health), health.job or "", health.user or "",
        "unknown" if now is None else now.kind, "" if now is None else _on_day_of(now.since, until),
        "" if worst is None else worst.kind,
    )  # fmt: skip


def _name(health: EngineHealth) -> str:
    return " ".join(filter(None, (health.key.engine, health.key.model)))


def _address(health: EngineHealth) -> str:
    host, _, port = health.key.address.rpartition(":")
    address = f"{health.key.node}:{port}" if health.key.node and host in LOOPBACK else health.key.address
    return address + ("" if health.key.rank is None else f" rank {health.key.rank}")


def _on_day_of(moment: datetime, reference: datetime, *, seconds: bool = False) -> str:
    """Return a time, without the date if it is that of ``reference``."""
    day, _, time_of_day = (text := clock(moment, seconds=seconds)).partition(" ")
    return time_of_day if clock(reference).startswith(day) else text


def _met(item: Evidence) -> str:
    if item.unknown:
        return "unknown"
    return "yes" if item.met else "no" if item.threshold else ""


def _explain_engine(health: EngineHealth, *, everything: bool) -> None:
    job = "" if health.job is None else f", job {health.job}"
    user = "" if health.user is None else f" of {health.user}"
    echo(f"{_name(health)} at {_address(health)}{job}{user}")
    failed = f", {health.failed:,} of them failed" if health.failed else ""
    span = f"{clock(health.since, seconds=True)} to {clock(health.until, seconds=True)}"
    echo(f"{span}: {health.samples:,} scrapes{failed}", "")
    rows = [
        (
            clock(diagnosis.since, seconds=True),
            _on_day_of(diagnosis.until, diagnosis.since, seconds=True),
            diagnosis.kind,
            percent(diagnosis.confidence),
            diagnosis.summary,
        )
        for diagnosis in health.diagnoses
    ]
    if not rows:
        echo("No diagnosis: the samples do not show requests, memory or progress.")
        return
    print_table(("from", "to", "diagnosis", "confidence", "summary"), rows, right=("confidence",), whole=("diagnosis",))
    for diagnosis in health.diagnoses:
        if diagnosis.severity == "none" and not everything:
            continue
        echo("", f"{diagnosis.kind}, {clock(diagnosis.since, seconds=True)}: {diagnosis.rule}")
        proof = [(_met(item), item.dimension, item.threshold or "", item.text) for item in diagnosis.evidence]
        print_table(("met", "evidence", "expected", "observed"), proof)
        for label, text in (("Advice", diagnosis.advice), ("Doubt", diagnosis.doubt)):
            if text:
                echo(f"{label}: {text}")


_TUNE_EPILOG = """\b
Examples:
  slurm-affinode serving tune 4711 --log slurm-4711.out
  slurm-affinode serving tune gpu01:8000 --since 7d --log server.log --write
  slurm-affinode serving tune gpu01:8000 --live --watch 1m

\b
Exit status: 0 done, 1 no engine matches, 2 invalid input or no samples, 3 Prometheus does not respond.
"""
_STABLE = 3
"""Evaluations in a row that give the same advice before --watch prints it."""


@command(epilog=_TUNE_EPILOG)
@config_options
@prometheus_options
@click.argument("target", metavar="JOBID|ADDRESS")
@period_options
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help="Read this log of the engine: memory at startup, failures; may be repeated",
)
@click.option("--write", is_flag=True, help="Print only a command line with the recommended options")
@click.option(
    "--watch",
    "watch_s",
    type=Span(),
    metavar="SPAN",
    help="Evaluate every SPAN and print the advice when a change is stable",
)
@json_option
def tune(
    *, config: Config, target: str, logs: tuple[str, ...], write: bool, watch_s: float | None, live: bool,
    with_prometheus: bool, as_json: bool, **query: Any,
) -> int:  # fmt: skip
    """Recommend settings of an engine from what its requests needed. Nothing is changed.

    Uses observed lengths of requests, peak KV usage, preemptions, queues, free GPU memory and, from a log, failures and
    the memory figures of the start. Each recommendation names the figures behind it and its cost. The memory share is
    raised only if GPU memory was free and none ran out. The command line keeps the options that vLLM has logged at its
    start.
    """
    selection = _query_of(target, query)
    if watch_s is None:
        tuned = _tuned(config, selection, logs, live=live or with_prometheus)
        _show_tuning(tuned, target, write=write, as_json=as_json)
        return 0 if tuned else 1
    if "-" in logs:
        raise click.UsageError("--watch reads the logs again for each evaluation: give a file in place of -")
    warn(f"slurm-affinode: evaluated every {span(watch_s)}; printed when {_STABLE} evaluations in a row agree")
    shown: list[TunedEngine] | None = None
    tuned_engines: list[list[TunedEngine]] = []
    while True:
        try:
            tuned = _tuned(config, selection, logs, live=live or with_prometheus)
        except UnreachableError as error:  # the server may be restarted, and responds again then
            if not tuned_engines:
                raise
            warn(f"slurm-affinode: {error}")
        else:
            tuned_engines = [*tuned_engines[-_STABLE + 1 :], tuned]
            stable = len(tuned_engines) == _STABLE and all(_agree(earlier, tuned) for earlier in tuned_engines)
            if stable and (shown is None or not _agree(shown, tuned)):
                shown = tuned
                if not write and not as_json:
                    echo(f"{clock(datetime.now(UTC), seconds=True)}")
                _show_tuning(tuned, target, write=write, as_json=as_json)
        time.sleep(watch_s)


def _tuned(config: Config, selection: ServerQuery, logs: Sequence[str], *, live: bool) -> list[TunedEngine]:
    with _samples(config, selection, live=live) as (store, period):
        return servers.tune(store, period, scan_logs(logs))


def _agree(first: Sequence[TunedEngine], second: Sequence[TunedEngine]) -> bool:
    """Return whether the advice for the same engines is the same."""
    return [engine.health.key for engine in first] == [engine.health.key for engine in second] and all(
        before.tuning.agrees(after.tuning) for before, after in zip(first, second, strict=True)
    )


def _show_tuning(tuned: Sequence[TunedEngine], target: str, *, write: bool, as_json: bool) -> None:
    if as_json:
        print_json([
            {"key": plain(engine.health.key), "job": engine.health.job, **engine.tuning.as_json(),
             "command": engine.tuning.command(engine.health.key.model)}
            for engine in tuned
        ])  # fmt: skip
        return
    if not tuned:
        warn(f"slurm-affinode: no samples of {target} in the period")
    for place, engine in enumerate(tuned):
        tuning, facts = engine.tuning, engine.tuning.facts
        line = tuning.command(engine.health.key.model)
        if write:
            if not tuning.options:
                warn(f"slurm-affinode: {_address(engine.health)}: no option is recommended")
            elif line is None:
                warn(f"slurm-affinode: the command of {facts.engine} is not known")
            else:
                echo(line)
            continue
        if place:
            echo()
        echo(f"{_name(engine.health)} at {_address(engine.health)}")
        print_table(("observed", "value"), tuning_rows(facts))
        echo()
        if not tuning.recommendations:
            echo("No change is recommended.")
        for item in tuning.recommendations:
            value = "" if item.proposed is None else f" to {_setting(item.proposed)}"
            current = "" if item.current is None else f" (now {_setting(item.current)})"
            echo(f"{item.direction} {item.option or item.setting}{value}{current}")
            echo(f"  because: {item.reason}")
            echo(f"  cost: {item.cost}")
        for text in tuning.unknown:
            echo(f"unknown: {text}")
        if line is not None:
            echo("", line)


def _setting(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"


def tuning_rows(facts: TuningFacts) -> list[tuple[str, str]]:
    """Return the rows of the table of observed figures."""
    free = "unknown"
    if facts.gpu_free_gib is not None:
        free = f"{_figure(facts.gpu_free_gib)} of {_figure(facts.gpu_total_gib, ' GiB')}"
    return [
        ("requests completed", _figure(facts.requests)),
        # The longest one is known by the bucket of a histogram that it is in.
        ("prompt tokens, mean and upper bound", f"{_figure(facts.prompt_mean)}, {_figure(facts.prompt_longest)}"),
        ("answer tokens, mean and upper bound", f"{_figure(facts.output_mean)}, {_figure(facts.output_longest)}"),
        ("KV cache", _figure(facts.kv_tokens, " tokens")),
        ("KV usage, peak and while requests wait", f"{_figure(facts.kv_peak)}, {_figure(facts.kv_when_waiting)}"),
        ("running and waiting, peaks", f"{_figure(facts.running_peak)}, {_figure(facts.waiting_peak)}"),
        ("preemptions", _figure(facts.preemptions)),
        ("least free GPU memory", free),
        ("failures in the logs", "unknown: no log of this engine alone" if facts.failures is None else
         ", ".join(dict.fromkeys(failure.kind for failure in facts.failures)) or "none"),
    ]  # fmt: skip


def _figure(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{figure(value)}{unit}"


_TRIAGE_EPILOG = """\b
Examples:
  slurm-affinode serving triage 4711
  slurm-affinode serving triage slurm-4711.out /var/log/slurm/slurmd.log.gz
  dmesg | slurm-affinode serving triage 4711 - --json

\b
Exit status: 0 a cause was found, 1 none was found, 2 invalid input, 3 accounting does not respond.
"""


@command(epilog=_TRIAGE_EPILOG)
@click.argument("targets", nargs=-1, required=True, metavar="JOBID|FILE...", type=click.Path(allow_dash=True))
@click.option("--all", "all_lines", is_flag=True, help="Show all failures in the logs, not only the first ones")
@json_option
@config_options
def triage(*, config: Config, targets: tuple[str, ...], all_lines: bool, as_json: bool) -> int:
    """Find out which memory ran out, or what else ended a job.

    Reads the job's output files and accounting (sacct), the FILEs given (output of jobs, slurmd's log, the kernel's
    log; compressed or not), and the last stored samples of the job's GPUs and engines in the hour before it failed.
    Recognizes messages of PyTorch, CUDA, JAX, NCCL, vLLM, SGLang, llama.cpp, Python, the kernel and Slurm, and says how
    much memory was requested and free, who held it, and what to change. - is standard input; a log whose name is a
    number is written as ./123.
    """
    with progress("log", total=None, quiet=as_json, of_bytes=True) as advance:
        last = functools.partial(pipeline.last_metrics, config)
        examination = pipeline.examine(targets, run=process.run, metrics=last, advance=advance)
    for problem in examination.problems:
        warn(f"slurm-affinode: {problem}")
    result = examination.result
    if as_json:
        print_json({**result.as_json(), "problems": list(examination.problems)})
    else:
        _show(result, all_lines=all_lines)
    return 1 if result.kind is None else 0


def _show(result: CrashTriage, *, all_lines: bool) -> None:
    what = "no cause" if result.kind is None else result.kind
    echo(f"{what}: {result.summary}")
    rows: list[tuple[str, str]] = []
    if result.kind is not None:
        ran_out = "none" if result.memory is None else MEMORIES[result.memory]
        rows.append(("memory that ran out", ran_out))
        if result.memory is not None:
            rows += [
                ("requested", _size(result.requested)),
                ("free", _size(result.free)),
                ("in total", _size(result.total)),
            ]
        if result.cause is not None and result.cause.max_length is not None:
            rows.append(("longest request that fits", f"{result.cause.max_length:,} tokens"))
        rows += [(f"held by {name}", size(round(held_bytes))) for name, held_bytes in result.holders]
        rows.append(("confidence", percent(result.confidence)))
    job = result.job
    if job is not None:
        end = "" if job.end is None else f", ended {clock(job.end)}"
        signal = f", signal {job.exit_signal}" if job.exit_signal else ""
        code = "" if job.exit_code is None else f", exit status {job.exit_code}{signal}"
        rows.append((f"job {job.job_id}", f"{job.state or 'unknown'}{code}{end}"))
        rows.append(("MaxRSS of allocated memory", f"{_size(job.max_rss_bytes)} of {_size(job.memory_bytes)}"))
        rows += [(f"step {step}", state) for step, state in job.steps]
    if result.startup.kv_tokens is not None:
        rows.append(("KV cache at startup", f"{result.startup.kv_tokens:,} tokens"))
    if job is not None and not result.metrics:
        rows.append(("last metrics", "unknown: no sample in the hour before"))
    rows += [(metrics.source, _last(metrics)) for metrics in (result.metrics if all_lines else result.metrics[:_SHOWN])]
    if rows:
        echo()
        print_table(("figure", "value"), rows)
    shown = result.failures if all_lines else result.failures[:_SHOWN]
    if shown:
        echo()
        cause = result.cause
        names = _short_names([name for name, _ in result.logs])
        lines = [
            (
                "cause" if failure is cause else "",
                f"{names[failure.log]}:{failure.line}",
                failure.kind,
                failure.text if failure.times == 1 else f"{failure.text} ({failure.times} times)",
            )
            for failure in shown
        ]
        print_table(("", "log", "failure", "message"), lines)
        if len(shown) < len(result.failures):
            echo(f"{len(result.failures) - len(shown)} more: --all")
    for title, texts in (("Advice", result.advice), ("Doubts", result.doubts)):
        if texts:
            echo("", f"{title}:")
            for text in texts:
                echo(f"  - {text}")


_SHOWN = 12
"""Failures, and engines and GPUs, shown without --all."""


def _last(metrics: LastMetrics) -> str:
    """Return the figures of a sample with its time, those of an engine or of a GPU."""
    values = dict(metrics.figures)

    def shown(name: str, unit: str = "") -> str:
        return _figure(values.get(name), unit)

    if "kv_usage" in values:
        asleep = {None: "unknown whether asleep", 0.0: "awake"}.get(values["asleep"], "asleep")
        failed = f", then {shown('failed_scrapes')} failed scrapes" if values["failed_scrapes"] else ""
        load = f"{shown('running')} running, {shown('waiting')} waiting"
        text = f"KV usage {shown('kv_usage')}, {load}, {asleep}{failed}"
    else:
        memory = f"memory {shown('fb_used_mib')} of {shown('fb_total_mib', ' MiB')}"
        text = f"{memory}, utilization {shown('util_pct', ' %')}, power {shown('power_w', ' W')}"
    return f"{clock(metrics.time, seconds=True)}: {text}"


def _short_names(logs: Sequence[str]) -> dict[str, str]:
    """Return log -> its file name, or its path where two logs have the same name."""
    names = [PurePath(log).name or log for log in logs]
    return {log: name if names.count(name) == 1 else log for log, name in zip(logs, names, strict=True)}


def _size(value: float | None) -> str:
    return "unknown" if value is None else size(round(value))
