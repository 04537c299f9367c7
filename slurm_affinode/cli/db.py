"""``slurm-affinode db``: the database."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

import click

from slurm_affinode.base.config import Config
from slurm_affinode.base.text import size
from slurm_affinode.cli.command import group
from slurm_affinode.cli.options import clock, config_options, echo, json_option, print_json, print_table, zone
from slurm_affinode.db import migrations
from slurm_affinode.db.repository import Repository

_EPILOG = """\b
The default is SQLite in the state directory; --db, the key store.db or SLURM_AFFINODE_DB select another database:
  slurm-affinode db status
  slurm-affinode db upgrade --db postgresql://affinode@db.example.org/affinode
  slurm-affinode db upgrade --db mariadb://affinode@localhost/affinode
PostgreSQL and MariaDB need an empty database and a user that may create tables in it.
"""


@group(epilog=_EPILOG)
def db() -> None:
    """Upgrade or inspect the database.

    Every command that opens the database applies pending migrations; "upgrade" does only that, for example as a
    user with more rights.
    """


@db.command()
@config_options
@json_option
def upgrade(config: Config, as_json: bool) -> None:
    """Apply pending migrations. Idempotent; safe to run concurrently."""
    with Repository.open(config.db_url, upgrade=False) as repository:
        applied = migrations.upgrade(repository.engine)
        version = migrations.status(repository.engine).version
        where = repository.where
    if as_json:
        print_json({"store": where, "version": version, "applied": [migration.name for migration in applied]})
        return
    for migration in applied:
        echo(f"applied {migration.name}")
    echo(f"{where}: schema {version}" + ("" if applied else ", nothing to do"))


@db.command()
@config_options
@json_option
def status(config: Config, as_json: bool) -> None:
    """Show the schema version and the amount of stored data. Read-only.

    Exit status 1 if migrations are pending.
    """
    with Repository.open(config.db_url, upgrade=False, create=False) as repository:
        schema = migrations.status(repository.engine)
        counts = repository.counts() if not schema.pending else None
        where = repository.where
    pending = [migration.name for migration in schema.pending]
    if as_json:
        facts = {} if counts is None else {name: getattr(counts, name) for name in counts.__dataclass_fields__}
        print_json({"store": where, "version": schema.version, "pending": pending, **facts})
    else:
        rows: list[tuple[str, object]] = [("database", where), ("schema", schema.version)]
        if pending:
            rows.append(("pending", f"{', '.join(pending)} (slurm-affinode db upgrade)"))
        if counts is not None:
            rows += [
                ("size", size(counts.size_bytes)),
                ("job runs", f"{counts.jobs} ({counts.gpu_jobs} with GPUs, {counts.running_jobs} running)"),
                ("from, to", f"{_time(counts.first)}, {_time(counts.last)} ({zone()})"),
                ("clusters", ", ".join(counts.clusters) or "none"),
                ("steps", counts.steps),
                ("recorded GPUs", counts.allocation_gpus),
                ("ingests", counts.ingests),
                ("reports", counts.reports),
            ]
        print_table(("", ""), rows)
    if pending:
        raise SystemExit(1)


@db.command(
    epilog="""\b
  slurm-affinode db forget alice              what would be changed
  slurm-affinode db forget alice --apply
"""
)
@click.argument("user")
@click.option("--apply", is_flag=True, help="Change the data [default: only show what would be changed]")
@config_options
@json_option
def forget(config: Config, *, user: str, apply: bool, as_json: bool) -> None:
    """Replace a user by a pseudonym, and remove texts and published files that name the user.

    Jobs, steps, suspensions, audit, warnings and keeps get one pseudonym, so that sums remain; UIDs, names, comments,
    directories and command lines of the jobs are removed. Reports that name the user and the published summaries of
    the user's jobs are deleted. Records of jobs submitted until now get the pseudonym also if they are ingested again.
    """
    from slurm_affinode.pipeline.forget import forget as forget_user  # noqa: PLC0415 - it reads the sample stores

    outcome = forget_user(config, user, datetime.now(UTC), apply=apply)
    if as_json:
        print_json({"user": user, "applied": apply, **asdict(outcome)})
        return
    rows: list[tuple[str, object]] = [(f"rows of {table}", count) for table, count in outcome.rows.items()]
    rows += [("reports to delete", ", ".join(outcome.reports))] if outcome.reports else []
    rows += [("files to delete", ", ".join(outcome.files))] if outcome.files else []
    if not rows:
        echo(f"no data of {user} is stored")
    else:
        print_table(("", ""), rows)
        echo("", f"{user} is now {outcome.pseudonym}" if apply else "nothing was changed; to change it: --apply")
    echo("", "not changed by this command:", *(f"  {place}" for place in outcome.remaining))


def _time(moment: datetime | None) -> str:
    return "-" if moment is None else clock(moment, seconds=True)
