"""``slurm-affinode demo``: a report from built-in sample data, without any setup."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import NumberInRange, echo, json_option, print_json, print_table, stages
from slurm_affinode.demo import histories
from slurm_affinode.demo.histories import ingest_demo, replay_demo, report_demo

DAYS = 7.0
SEED = 7
TREND = 3


@command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/demo"), show_default=True,
    metavar="DIR", help="Write the input, the database and the report to DIR",
)  # fmt: skip
@click.option("--recorded/--synthetic", help="Use a recording of a small cluster, or an invented week of a larger one")
@click.option(
    "--days", type=NumberInRange(0.5, 60), help=f"Set the length of the synthetic history [default: {DAYS:g}]"
)
@click.option("--seed", type=click.IntRange(0), help=f"Set the seed of the synthetic history [default: {SEED}]")
@click.option(
    "--trend", type=click.IntRange(0, 11), metavar="N", help=f"Invent N earlier periods as well [default: {TREND}]"
)
@json_option
def demo(
    *, out: Path, recorded: bool, days: float | None, seed: int | None, trend: int | None, as_json: bool
) -> None:  # fmt: skip
    """Analyze an included history and render the report.

    The history is invented: a week of a cluster with 32 GPUs on six nodes, and the weeks before it for the trend.
    --recorded uses a recording of 12 minutes from a Slurm cluster in containers with emulated GPUs, and from a real
    inference engine on a CPU. It is written as sacct text and samples to DIR/input, ingested like a site's own files
    into DIR/state, and reported in DIR/report.html and DIR/summary.json. The queue of the invented cluster is also
    replayed with jobs suspended after 15 minutes without activity (see "whatif"), in DIR/whatif.html.
    """
    if recorded and any(value is not None for value in (days, seed, trend)):
        raise click.UsageError("--days, --seed and --trend are for the synthetic history: leave out --recorded")
    history = (
        histories.recorded()
        if recorded
        else histories.synthetic(
            days=DAYS if days is None else days,
            seed=SEED if seed is None else seed,
            earlier=TREND if trend is None else trend,
        )
    )
    with stages() as step:
        ingest_demo(out, history, step=step)
        replay = None if as_json else replay_demo(out, history, step=step)
        result = report_demo(out, history, replay, step=step)
    if as_json:
        print_json(result.summary)
        return
    echo(history.about, "")
    print_table(("", "GPU-hours", "of allocated"), result.headline, right=("GPU-hours", "of allocated"))
    echo()
    files = [("report", result.report), ("summary", result.summary_path), ("input", out / "input")]
    if replay is not None:
        echo(replay.note.answer, replay.note.assumption, "")
        files.insert(1, ("what-if", replay.page))
    for name, path in files:
        echo(f"{name:<8} {path}")
