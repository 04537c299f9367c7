"""``slurm-affinode demo``: a report from a synthetic history, with nothing to set up."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.cli.options import json_option, print_json, print_table, stages
from slurm_affinode.demo.build import build_demo


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/demo"), show_default=True,
    metavar="DIR", help="Where the input, the store and the report go.",
)  # fmt: skip
@click.option("--days", type=click.FloatRange(0.5, 60), default=7.0, show_default=True, help="Length of the history.")
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="The same seed, the same history.")
@json_option
def demo(out: Path, days: float, seed: int, as_json: bool) -> None:
    """Build a synthetic history, analyse it, render the report.

    The history is invented (32 GPUs on six nodes). It is written as sacct text and as GPU samples under DIR/input,
    taken in like a site's own files into DIR/state, and reported in DIR/report.html and DIR/summary.json.
    """
    with stages() as step:
        result = build_demo(out, days=days, seed=seed, step=step)
    if as_json:
        print_json(result.summary)
        return
    click.echo(f"{days:g} days of an invented cluster: 32 GPUs on six nodes. The data is synthetic.\n")
    print_table(("", "GPU-hours", "share"), result.headline, right=("GPU-hours", "share"))
    click.echo("")
    for name, path in (("report", result.report), ("summary", result.summary_path), ("input", out / "input")):
        click.echo(f"{name:<8} {path}")
