"""``slurm-affinode zombies policy``."""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from slurm_affinode.base import extras
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.cli.command import group
from slurm_affinode.cli.options import (
    Span,
    When,
    clock,
    config_options,
    echo,
    json_option,
    print_json,
    print_table,
    progress,
    warn,
    zone,
)
from slurm_affinode.model.cleanup import Policy
from slurm_affinode.zombies import policy as site_policy

_CHECK_EPILOG = """\b
Examples:
  slurm-affinode zombies policy check                  the policy in effect, replayed over the last week
  slurm-affinode zombies policy check new.toml         another file
  slurm-affinode zombies policy check new.toml --no-replay

\b
Exit status: 0 valid, 1 errors found (by line), 2 unreadable.
"""


@group()
def policy() -> None:
    """Check the clean-up policy, or show the built-in one."""


@policy.command()
def show() -> int:
    """Print the built-in policy, as a starting point."""
    click.echo((asset_dir("reports") / "zombies-policy.toml").read_text(encoding="utf-8"), nl=False)
    return 0


@policy.command(epilog=_CHECK_EPILOG)
@config_options
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--since", type=When(), default="7d", metavar="TIME", help="Begin the replay at TIME  [default: 7d]")
@click.option("--until", type=When(), default="now", metavar="TIME", help="End the replay at TIME  [default: now]")
@click.option("--every", type=Span(60), default="15m", metavar="SPAN", show_default=True,
              help="Assume that the timer runs every SPAN")  # fmt: skip
@click.option("--look-every", type=Span(60), default="4h", metavar="SPAN", show_default=True,
              help="Sample the stored metrics every SPAN; shorter findings may be missed")  # fmt: skip
@click.option("--replay/--no-replay", default=True, show_default=True, help="Show the actions of the past period")
@json_option
def check(
    *, config: Config, file: Path | None, since: datetime, until: datetime, every: float, look_every: float,
    replay: bool, as_json: bool,
) -> int:  # fmt: skip
    """Describe a policy, report errors by line, and replay it over the last week.

    FILE is the policy. [default: zombies.policy, /etc/slurm-affinode/zombies.toml, built-in]
    """
    now = datetime.now(UTC)
    site, faults = site_policy.examine(config, file)
    if faults:
        if as_json:
            print_json({"policy": site.where, "faults": [dataclasses.asdict(fault) for fault in faults]})
        for fault in () if as_json else faults:
            echo(f"{site.where}:{fault.line}: {fault.message}")
            if fault.hint:
                echo(f"  {fault.hint}")
        return 1
    replays, note = _replay(config, site, since, until, every, look_every) if replay else ([], None)
    lines = site_policy.explain(site, now)
    if as_json:
        print_json({
            "policy": site.where, "faults": [], "says": lines, "note": note,
            "replay": None if note or not replay else [
                {"at": replayed.time, "verb": replayed.action.verb, "code": replayed.action.code,
                 "number": replayed.action.number, "target": replayed.action.target,
                 "user": replayed.action.finding.user, "kind": replayed.action.finding.kind,
                 "reason": replayed.action.reason, "rule": replayed.action.rule, "finding": replayed.action.finding.key}
                for replayed in replays
            ],
        })  # fmt: skip
        return 0
    echo(f"{site.where}: no mistakes")
    for line in lines:
        echo(f"  {line}")
    if note:
        warn(note)
    elif replay:
        _print_replay(replays, since, until)
    return 0


def _replay(  # noqa: PLR0917
    config: Config, site: Policy, since: datetime, until: datetime, every_s: float, sampled_every_s: float
) -> tuple[list[site_policy.Replayed], str | None]:  # fmt: skip
    if extras.missing():
        return [], f"the replay is not possible: it needs the extra analysis; {extras.INSTALL}"
    from slurm_affinode.zombies import find  # noqa: PLC0415

    config = site_policy.reaching(config, site)
    samples, problem = [], None
    # The last one is at the end of the interval, whatever its length.
    count = max(0, math.ceil((until - since).total_seconds() / sampled_every_s))
    with progress("looking at the history", max(1, count)) as advance:
        for number in range(1, count + 1):
            moment = min(since + timedelta(seconds=number * sampled_every_s), until)
            try:
                request = find.Request(until=moment, running_only=False)
                samples.append(find.find(config, request, slurm=None, now=moment).findings)
            except AffinodeError as error:
                problem = str(error)
            advance(1)
    if not samples:
        return [], f"the replay is not possible: {problem or 'the interval is empty'}"
    past = site_policy.episodes(samples)
    return site_policy.replay(past, site, since, until, timedelta(seconds=every_s)), None


def _print_replay(replays: list[site_policy.Replayed], since: datetime, until: datetime) -> None:
    echo("", f"From {clock(since)} to {clock(until)} ({zone()}) it would have done:")
    rows = [
        (clock(replayed.time),
         replayed.action.verb if replayed.action.verb != "none" else f"none ({replayed.action.code})",
         replayed.action.number or "", replayed.action.target, replayed.action.finding.user,
         replayed.action.finding.kind, replayed.action.reason)
        for replayed in replays
    ]  # fmt: skip
    if not rows:
        echo("  nothing")
        return
    columns = ("at", "action", "number", "target", "user", "kind", "why")
    print_table(columns, rows, right=("number",), whole=("at",), minor=("number", "kind", "user"))
    counts: dict[str, int] = {}
    for replayed in replays:
        counts[replayed.action.verb] = counts.get(replayed.action.verb, 0) + 1
    echo("; ".join(f"{verb}: {count}" for verb, count in sorted(counts.items())))
