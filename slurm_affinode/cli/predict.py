"""``slurm-affinode predict``: run time, memory and idle time of submissions from the jobs that ended before them."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_affinode.base.config import MODEL_FILE, Config
from slurm_affinode.base.sizes import parse_size
from slurm_affinode.base.text import counted, percent, size, span
from slurm_affinode.cli.command import group
from slurm_affinode.cli.options import (
    LogFile,
    Span,
    When,
    config_options,
    echo,
    json_option,
    print_json,
    print_table,
    stages,
    warn,
)
from slurm_affinode.traces import queue_logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_affinode.pipeline.prediction import Evaluation, SubmissionSource
    from slurm_affinode.prediction.advice import TargetAdvice
    from slurm_affinode.prediction.evaluation import TargetEvaluation

_EPILOG = """\b
Examples:
  slurm-affinode predict evaluate --trace swf:KTH-SP2-1996-2.swf.gz
  slurm-affinode predict train --since 365d
  slurm-affinode predict advise --user ann --name train.sh
"""


@group(epilog=_EPILOG)
def predict() -> None:
    """Predict run time, memory and idle time of a job from jobs that ended before its submission.

    Predictors: the requested limit, the mean of the user's last two jobs, the median of the last similar jobs of the
    user, and quantile models of LightGBM (extra "predict"). Of each target the one is used that was best on later jobs;
    a model only if its gain is beyond chance.
    """


def _source_options(function: Any) -> Any:
    for option in (
        config_options,
        click.option("--cluster", multiple=True, metavar="NAME", help="Use jobs of this cluster; may be repeated"),
        click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="Use jobs to TIME"),
        click.option(
            "--since", type=When(), default="365d", show_default=True, metavar="TIME", help="Use jobs from TIME on"
        ),
        click.option(
            "--trace",
            type=LogFile(*queue_logs.READERS),
            metavar="KIND:PATH",
            help="Use a log or trace, such as swf:FILE",
        ),
    ):
        function = option(function)
    return function


def _model_option(text: str) -> Callable[[Any], Any]:
    return click.option(
        "--model", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help=f"{text} [default: {MODEL_FILE} in the state directory]",
    )  # fmt: skip


def _read(
    config: Config, trace: tuple[str, Path] | None, interval: tuple[datetime, datetime], cluster: tuple[str, ...],
    step: Callable[[str], None],
) -> SubmissionSource:  # fmt: skip
    from slurm_affinode.pipeline import prediction  # noqa: PLC0415 - --help stays quick

    since, until = interval
    if trace is not None:
        step(f"reading {trace[1].name}")
        return prediction.read_trace(*trace)
    if until <= since:
        raise click.UsageError("the interval ends before it begins: choose --since before --until")
    return prediction.read_site(config, since, until, clusters=cluster, idle=True, step=step)


@predict.command("train", short_help="Train models and write them to a file")
@_model_option("Write to FILE")
@json_option
@_source_options
def train(
    *, config: Config, trace: tuple[str, Path] | None, since: datetime, until: datetime, cluster: tuple[str, ...],
    model: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Train models of the jobs in accounting or in a log, and write them to a file.

    The file is JSON. It has no names of users or jobs: predictions take the earlier jobs from accounting.

    \b
    Example:
      slurm-affinode predict train --since 365d
    """
    from slurm_affinode.pipeline import prediction  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.prediction import model_file  # noqa: PLC0415

    path = model or config.state_dir / MODEL_FILE
    with stages(quiet=as_json) as step:
        source = _read(config, trace, (since, until), cluster, step)
        trained = prediction.train(source, step=step)
        model_file.write(path, trained)
    _show_model(path, trained, as_json=as_json)


@predict.command("show", short_help="Show a trained model")
@_model_option("Show FILE")
@json_option
@config_options
def show(*, config: Config, model: Path | None, as_json: bool) -> None:
    """Show for each target of a model which predictor is used, and why."""
    from slurm_affinode.prediction import model_file  # noqa: PLC0415 - --help stays quick

    path = model or config.state_dir / MODEL_FILE
    _show_model(path, model_file.read(path), as_json=as_json)


def _show_model(path: Path, model: Any, *, as_json: bool) -> None:
    rows = [
        {"target": target.target, "predictor": target.predictor, "reason": target.reason, "jobs": target.jobs,
         "losses": dict(target.losses),
         "interval_factors": None if target.factors is None else dataclasses.asdict(target.factors)}
        for target in model.targets
    ]  # fmt: skip
    if as_json:
        print_json({
            "model": str(path), "features": model.features, "created": model.created, "source": model.source,
            "first_s": model.first_s, "last_s": model.last_s, "targets": rows,
        })  # fmt: skip
        return
    print_table(
        ("target", "jobs", "predictor", "reason"),
        [(row["target"], f"{row['jobs']:,}", row["predictor"], row["reason"]) for row in rows], right=("jobs",),
    )  # fmt: skip
    echo("", f"model    {path}", f"trained  {model.created}, {model.source}, features {model.features}")


@predict.command("evaluate", short_help="Compare all predictors on later jobs")
@click.option(
    "--capacity", type=click.IntRange(1), metavar="N",
    help="Set the processors or GPUs of the simulated pool [default: MaxProcs of an SWF log; GPUs held at once]",
)  # fmt: skip
@click.option("--no-schedule", is_flag=True, help="Do not simulate the queue with the predicted run times")
@json_option
@_source_options
def evaluate(
    *, config: Config, trace: tuple[str, Path] | None, since: datetime, until: datetime, cluster: tuple[str, ...],
    capacity: int | None, no_schedule: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compare all predictors on jobs that were submitted later than those of the training.

    Models are trained with the first half of the submissions, predictors selected with the next fifth, and the figures
    are those of the last 30 %. The queue is simulated with each kind of run times as estimates, where the size of the
    machine is known.
    """
    from slurm_affinode.pipeline import prediction  # noqa: PLC0415 - --help stays quick

    with stages(quiet=as_json) as step:
        source = _read(config, trace, (since, until), cluster, step)
        evaluation = prediction.evaluate(source, capacity=capacity, schedules=not no_schedule, step=step)
    if as_json:
        print_json(dataclasses.asdict(evaluation))
        return
    for target in evaluation.targets:
        _show_target(target)
    if evaluation.schedules:
        _show_schedules(evaluation)
    elif not no_schedule:
        warn(f"no schedule is simulated: {evaluation.no_schedules}")
    for left_out in evaluation.left_out:
        warn(f"left out: {counted(left_out.jobs, 'job')} {left_out.reason}")
    if not evaluation.recorded_waits:
        warn("the log has no waits: jobs count as ended at their submission plus their run time")


def _show_target(target: TargetEvaluation) -> None:
    headings = ("predictor", "jobs", "pinball loss", "coverage of 90 %", "over", "under", "over, upper bound",
                "under, upper bound")  # fmt: skip
    rows = [
        (quality.predictor + (" (used)" if quality.predictor == target.choice.predictor else ""), f"{quality.jobs:,}",
         _loss(quality.pinball, target.unit), _share(quality.coverage), _whole_percent(quality.over_requested),
         percent(quality.under_requested), _whole_percent(quality.upper_over_requested),
         _share(quality.upper_under_requested))
        for quality in target.qualities
    ]  # fmt: skip
    print_table(headings, rows, title=f"{target.target}: {target.choice.predictor}, {target.choice.reason}",
                right=headings[1:], minor=("jobs", "under, upper bound", "over, upper bound", "under"))  # fmt: skip
    if target.model_beats_median is not None:
        verb = "is below" if target.model_beats_median else "is not below"
        echo(f"On the jobs of the test, the loss of the model {verb} that of the median.")
    echo()


def _show_schedules(evaluation: Evaluation) -> None:
    headings = ("estimates", "order", "backfill", "mean wait", "bounded slowdown", "total completion", "max stretch",
                "makespan", "mean wait (test)", "slowdown (test)")  # fmt: skip
    rows = []
    for schedule in evaluation.schedules:
        whole, test = schedule.all_jobs, schedule.tested
        rows.append((
            schedule.estimates, schedule.order, schedule.backfill, f"{whole.mean_wait_s:,.1f} s",
            f"{whole.mean_bounded_slowdown:,.4f}",
            f"{whole.total_completion_s / 3600:,.0f} h", f"{whole.max_stretch:,.0f}", span(whole.makespan_s),
            *(("", "") if test is None else (f"{test.mean_wait_s:,.1f} s", f"{test.mean_bounded_slowdown:,.4f}")),
        ))  # fmt: skip
    print_table(
        headings, rows, title=f"Schedules on {counted(evaluation.capacity or 0, evaluation.unit or 'unit')}",
        right=headings[3:],
        minor=("makespan", "max stretch", "total completion", "slowdown (test)", "mean wait (test)"),
    )  # fmt: skip


@predict.command("advise", short_help="Advise on time limit and memory of a job")
@click.option("--user", required=True, metavar="NAME", help="Advise for a job of this user")
@click.option("--name", metavar="NAME", help="Advise for a job that repeats the last one of this name")
@click.option("--limit", type=Span(), metavar="SPAN", help="Assume this time limit [default: that of the last one]")
@click.option("--mem", metavar="SIZE", help="Assume this memory, such as 64G [default: that of the last one]")
@_model_option("Use FILE")
@json_option
@_source_options
def advise(
    *, config: Config, trace: tuple[str, Path] | None, since: datetime, until: datetime, cluster: tuple[str, ...],
    user: str, name: str | None, limit: float | None, mem: str | None, model: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Advise on the time limit and the memory of the next job of a user.

    The prediction takes the jobs that ended before --until (with --trace: before the end of the log).

    \b
    Example:
      slurm-affinode predict advise --user ann --name train.sh --limit 24h
    """
    from slurm_affinode.prediction import advice, model_file  # noqa: PLC0415 - --help stays quick

    trained = model_file.read(model or config.state_dir / MODEL_FILE)
    memory = None if mem is None else float(parse_size(mem))
    with stages(quiet=as_json) as step:
        source = _read(config, trace, (since, until), cluster, step)
        moment = source.last_s + 1 if trace is not None else int(until.timestamp())
        advised = advice.advise(
            source.submissions, trained, user, name, moment_s=moment, request_s=limit, request_mem_bytes=memory
        )  # fmt: skip
    if as_json:
        print_json(dataclasses.asdict(advised))
        return
    headings = ("target", "predicted", "90 % interval", "requested", "suggested", "similar jobs", "predictor")
    print_table(
        headings, [_advice_row(target) for target in advised.targets],
        title=f"Next job of {advised.user}, as job {advised.last_number}"
        + (f" ({advised.name})" if advised.name else ""),
        right=headings[1:6], minor=("similar jobs",),
    )  # fmt: skip
    for target in advised.targets:
        if target.requested is not None and target.high is not None and target.requested < target.high:
            warn(f"{target.target}: the request is below the upper bound, which 5 % of such jobs exceed")


def _advice_row(advice: TargetAdvice) -> tuple[str, ...]:
    def amount(value: float | None) -> str:
        return "unknown" if value is None else _amount(value, advice.unit)

    bounds = "unknown" if advice.low is None else f"{amount(advice.low)} to {amount(advice.high)}"
    return (advice.target, amount(advice.predicted), bounds, amount(advice.requested), amount(advice.suggested),
            f"{advice.similar_jobs:,}", advice.predictor)  # fmt: skip


def _amount(value: float, unit: str) -> str:
    if unit == "%":
        return percent(value / 100)
    return size(round(value)) if unit == "bytes" else span(value)


def _loss(value: float, unit: str) -> str:
    return size(round(value)) if unit == "bytes" else f"{value:,.1f} {unit}"


def _whole_percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:,.0f} %"


def _share(value: float | None) -> str:
    return "unknown" if value is None else percent(value)
