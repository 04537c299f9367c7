"""``slurm-affinode demo``: a report from built-in sample data, without any setup."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import NumberInRange, echo, json_option, print_json, print_table, stages
from slurm_affinode.demo import histories
from slurm_affinode.demo.histories import build_demo

DAYS = 7.0
SEED = 7


@command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/demo"), show_default=True,
    metavar="DIR", help="Write the input, the database and the report to DIR",
)  # fmt: skip
@click.option("--synthetic", is_flag=True, help="Use an invented week of a larger cluster")
@click.option(
    "--days", type=NumberInRange(0.5, 60), help=f"Set the length of the synthetic history [default: {DAYS:g}]"
)
@click.option("--seed", type=click.IntRange(0), help=f"Set the seed of the synthetic history [default: {SEED}]")
@json_option
def demo(*, out: Path, synthetic: bool, days: float | None, seed: int | None, as_json: bool) -> None:
    """Analyze an included history and render the report.

    The recording comes from a Slurm cluster in containers with emulated GPUs, and from a real inference engine on a
    CPU; --synthetic uses a longer, invented history of a larger cluster (32 GPUs on six nodes). It is written as
    sacct text and samples to DIR/input, ingested like a site's own files into DIR/state, and reported in
    DIR/report.html and DIR/summary.json.
    """
    if not synthetic and (days is not None or seed is not None):
        raise click.UsageError("--days and --seed require --synthetic")
    history = (
        histories.synthetic(days=DAYS if days is None else days, seed=SEED if seed is None else seed)
        if synthetic
        else histories.recorded()
    )
    with stages() as step:
        result = build_demo(out, history, step=step)
    if as_json:
        print_json(result.summary)
        return
    echo(history.about, "")
    print_table(("", "GPU-hours", "of allocated"), result.headline, right=("GPU-hours", "of allocated"))
    echo()
    for name, path in (("report", result.report), ("summary", result.summary_path), ("input", out / "input")):
        echo(f"{name:<8} {path}")
