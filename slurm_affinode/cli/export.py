"""``slurm-affinode export``: GPU samples in formats of other programs."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from pathlib import Path

import click

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.command import group
from slurm_affinode.cli.options import When, clock, config_options, echo, json_option, print_json, progress, zone
from slurm_affinode.cli.output import reader_gone
from slurm_affinode.metrics.openmetrics import as_openmetrics

_EPILOG = """\b
Examples:
  slurm-affinode export openmetrics --since 30d --until 4h --out gpu.om
  promtool tsdb create-blocks-from openmetrics gpu.om blocks/
  slurm-affinode export openmetrics --since 2026-11-01 --until 2026-11-02 --label job=dcgm --out - | head
"""
_LABEL = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)=(.*)", re.DOTALL)


@group()
def export() -> None:
    """Write stored GPU metrics in formats of other programs."""


@export.command(epilog=_EPILOG)
@click.option("--since", type=When(), default="7d", show_default=True, metavar="TIME", help="Begin at TIME")
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End before TIME")
@click.option("--out", type=click.Path(), required=True, metavar="FILE", help="Write to FILE, or - for standard output")
@click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="Add a label to every series; may be repeated"
)
@json_option
@config_options
def openmetrics(
    *, config: Config, since: datetime, until: datetime, out: str, labels: tuple[str, ...], as_json: bool
) -> None:
    """Write samples as OpenMetrics text with timestamps, to backfill Prometheus with promtool.

    Names are those of dcgm-exporter, with one line per value and job on the GPU. Leave the last hours to Prometheus
    itself (--until 4h): blocks must not overlap the data that it still has in memory.
    """
    if out == "-" and as_json:
        raise click.UsageError("--json needs --out FILE: standard output is taken")
    target = sys.stdout.buffer if out == "-" else Path(out)
    given = dict(_label(text) for text in labels)
    with progress("writing", total=None, quiet=as_json) as advance:

        def went_on(values: int) -> None:
            if out == "-" and reader_gone():
                raise click.exceptions.Exit(0)  # without a reader there is nothing left to do
            advance(values)

        written = as_openmetrics(config, since, until, target, labels=given, advance=went_on)
    if as_json:
        print_json({"out": out, **{name: getattr(written, name) for name in written.__dataclass_fields__}})
    elif out != "-":
        echo(f"{out}: {written.samples:,} samples of {written.series:,} series, {written.devices:,} devices")
        if written.first and written.last:
            first, last = clock(written.first, seconds=True), clock(written.last, seconds=True)
            echo(f"from {first} to {last} ({zone()})")


def _label(text: str) -> tuple[str, str]:
    match = _LABEL.fullmatch(text)
    if match is None or match.group(1).startswith("__"):
        raise AffinodeError(f"{text!r} is not a label", hint="write for example --label job=dcgm")
    return match.group(1), match.group(2)
