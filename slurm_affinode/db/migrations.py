"""Numbered migrations: ``sql/migrations/NNNN_name.sql``, applied in order, each once.

One file serves SQLite, PostgreSQL and MariaDB; where that is impossible, ``NNNN_name.DIALECT.sql`` (``sqlite``,
``postgresql`` or ``mariadb``) replaces ``NNNN_name.sql`` on that database. A statement ends with ``;`` at the end of a
line, ``--`` starts a comment line, names are in double quotes. MariaDB cannot roll back DDL, so statements are written
to be repeatable (``IF NOT EXISTS``).

``schema_migrations`` records applied migrations with their checksums. If a file was changed afterwards, or the database
is of a newer release, an error is raised and nothing is changed.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import BigInteger, Column, Connection, Engine, Integer, MetaData, String, Table, inspect, select

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.db.engine import reading, shown, write

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)(?:\.(sqlite|postgresql|mariadb))?\.sql")

schema_migrations = Table(
    "schema_migrations",
    MetaData(),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("name", String(128), nullable=False),
    Column("checksum", String(64), nullable=False),
    Column("applied", BigInteger, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration file."""

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, independent of the kind of line endings."""
        return hashlib.sha256("\n".join(self.sql.splitlines()).encode()).hexdigest()

    @property
    def statements(self) -> tuple[str, ...]:
        """The statements, without comment lines."""
        lines = [line for line in self.sql.splitlines() if line.strip() and not line.lstrip().startswith("--")]
        parts = re.split(r";[ \t]*(?:\n|$)", "\n".join(lines))
        return tuple(part.strip() for part in parts if part.strip())


@dataclass(frozen=True, slots=True)
class Status:
    """Migration status of a database."""

    version: int
    """Number of the last applied migration; 0 if there is none."""
    pending: tuple[Migration, ...]
    """Migrations not yet applied, in order."""


def migrations(dialect: str, directory: Path | None = None) -> tuple[Migration, ...]:
    """Return the migrations for ``dialect``, in order. Raises ``AffinodeError`` if the numbers are no sequence."""
    folder = directory or asset_dir("sql") / "migrations"
    common: dict[int, Path] = {}
    special: dict[int, Path] = {}
    for path in sorted(folder.glob("*.sql")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise AffinodeError(f"{path}: not a name of a migration (NNNN_name.sql)")
        migrations = special if match[3] else common
        if match[3] not in (None, dialect):
            continue
        if int(match[1]) in migrations:
            raise AffinodeError(f"{path}: its number is taken by {migrations[int(match[1])].name}")
        migrations[int(match[1])] = path
    chosen = {**common, **special}
    if sorted(chosen) != list(range(1, len(chosen) + 1)):
        raise AffinodeError(f"{folder}: the migrations are not numbered 1, 2, 3, ...")
    return tuple(
        Migration(version, chosen[version].name.split(".")[0], chosen[version].read_text(encoding="utf-8"))
        for version in sorted(chosen)
    )


def status(engine: Engine, directory: Path | None = None) -> Status:
    """Compare the database with the files. Raises ``AffinodeError`` for a changed or a newer migration."""
    available = migrations(_dialect(engine), directory)
    with reading(engine) as connection:
        return _compare(_applied(connection), available, shown(engine.url))


def upgrade(engine: Engine, directory: Path | None = None) -> tuple[Migration, ...]:
    """Apply pending migrations and return them. Of concurrent upgrades, the later one waits and finds none pending."""
    available = migrations(_dialect(engine), directory)

    def work(connection: Connection) -> tuple[Migration, ...]:
        schema_migrations.create(connection, checkfirst=True)
        pending = _compare(_applied(connection), available, shown(engine.url)).pending
        for migration in pending:
            for statement in migration.statements:
                connection.exec_driver_sql(statement.replace("%", "%%") if _percent(engine) else statement)
            connection.execute(
                schema_migrations.insert().values(
                    version=migration.version,
                    name=migration.name,
                    checksum=migration.checksum,
                    applied=int(time.time()),
                )
            )
        return pending

    return write(engine, work)


def _percent(engine: Engine) -> bool:
    """Return whether the driver treats ``%`` in a statement as a parameter marker."""
    return engine.dialect.paramstyle in ("format", "pyformat")


def _dialect(engine: Engine) -> str:
    return "mariadb" if engine.dialect.name == "mysql" else engine.dialect.name


def _applied(connection: Connection) -> dict[int, tuple[str, str]]:
    if not inspect(connection).has_table(schema_migrations.name):
        return {}
    rows = connection.execute(
        select(schema_migrations.c.version, schema_migrations.c.name, schema_migrations.c.checksum)
    )
    return {row.version: (row.name, row.checksum) for row in rows}


def _compare(applied: dict[int, tuple[str, str]], available: tuple[Migration, ...], where: str) -> Status:
    newest = max(applied, default=0)
    if newest > len(available):
        raise AffinodeError(
            f"{where}: the database has schema {newest}, this slurm-affinode knows up to {len(available)}",
            hint="it was upgraded by a newer slurm-affinode: use that one",
        )
    for migration in available:
        record = applied.get(migration.version)
        if record is not None and record[1] != migration.checksum:
            raise AffinodeError(
                f"{where}: migration {migration.version:04d} ({record[0]}) differs from the one that was applied",
                hint="the installation's sql/migrations was changed: install slurm-affinode again",
            )
    return Status(newest, tuple(m for m in available if m.version not in applied))
