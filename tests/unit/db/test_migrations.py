"""Migrations: numbered, applied once each, checked, and consistent with the tables in the code."""

from __future__ import annotations

import contextlib
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import BigInteger, Double, Float, SmallInteger, String, Text, inspect, text

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.db import migrations, tables
from slurm_affinode.db.engine import connect, parse_url
from slurm_affinode.db.repository import Repository


@pytest.fixture
def engine(store_url):
    engine = connect(parse_url(store_url))
    yield engine
    engine.dispose()


def write(folder, **files):
    for name, sql in files.items():
        path = folder / f"{name.replace('__', '.')}.sql"
        path.write_text(sql)
    return folder


def test_migrated_schema_matches_the_tables_in_the_code(engine):
    """Names, order, types, NULL and primary keys of every table agree, on every database."""
    migrations.upgrade(engine)
    inspector = inspect(engine)
    assert set(inspector.get_table_names()) == {*tables.metadata.tables, "schema_migrations"}
    for table in tables.metadata.tables.values():
        columns = inspector.get_columns(table.name)
        assert [column["name"] for column in columns] == [column.name for column in table.columns]
        assert set(inspector.get_pk_constraint(table.name)["constrained_columns"]) == set(
            table.primary_key.columns.keys()
        )
        for column, actual in zip(table.columns, columns, strict=True):
            assert actual["nullable"] == column.nullable, (table.name, column.name)
            kinds = {
                Text: (Text, String),
                String: (String,),
                BigInteger: (BigInteger,),
                Double: (Float,),
                SmallInteger: (SmallInteger,),
            }
            # MariaDB's LONGTEXT and SQLite's TEXT have their own SQLAlchemy classes: compare by family.
            assert isinstance(actual["type"], kinds[type(column.type)]), (table.name, column.name, actual["type"])
            if type(column.type) is String:
                assert actual["type"].length == column.type.length, (table.name, column.name)


def test_second_upgrade_applies_nothing(engine):
    assert [m.version for m in migrations.status(engine).pending] == [m.version for m in migrations.upgrade(engine)]
    assert migrations.upgrade(engine) == ()
    status = migrations.status(engine)
    assert (status.version, status.pending) == (len(migrations.migrations("sqlite")), ())


def test_database_opened_without_upgrade_is_unchanged(store_url):
    with Repository.open(store_url, upgrade=False) as repository:
        assert migrations.status(repository.engine).version == 0
        assert migrations.upgrade(repository.engine)
        assert migrations.status(repository.engine).pending == ()


def test_database_of_an_earlier_release_is_upgraded(tmp_path):
    """Nothing is lost, and new columns are unknown."""
    file = tmp_path / "affinode.sqlite"
    recorded = Path(__file__).parents[2] / "data" / "previous" / "database.sql"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript(recorded.read_text())
    with Repository.open(f"sqlite:///{file}") as repository:
        assert migrations.status(repository.engine).pending == ()
        counts = repository.counts()
        assert (counts.jobs, counts.steps, counts.ingests, counts.clusters) == (3, 4, 3, ("affinode",))
        jobs = repository.jobs(counts.first, counts.last).sort("job_id")
        assert jobs["job_name"].to_list() == ["scavenger", "keep-warm", "resnet-sweep"]
        assert jobs["suspended_s"].to_list() == [None] * 3
        [suspension] = repository.suspensions(datetime(2026, 11, 20, tzinfo=UTC), datetime(2026, 11, 21, tzinfo=UTC))
        assert (suspension.user, suspension.restored_node, suspension.shares_gpus) == ("alice", "c2", None)


def test_changed_migration_is_an_error(engine, tmp_path):
    migrations.upgrade(engine, write(tmp_path, **{"0001_a": 'CREATE TABLE a ("x" INT);\n'}))
    write(tmp_path, **{"0001_a": 'CREATE TABLE a ("x" INT);\r\n'})
    assert migrations.status(engine, tmp_path).pending == ()  # a different line ending is not a change
    write(tmp_path, **{"0001_a": 'CREATE TABLE a ("x" BIGINT);\n'})
    for operation in (migrations.status, migrations.upgrade):
        with pytest.raises(AffinodeError, match=r"migration 0001 .* differs from the one that was applied"):
            operation(engine, tmp_path)


def test_database_of_a_newer_release_is_an_error(engine, tmp_path):
    migrations.upgrade(engine, write(tmp_path, **{"0001_a": "SELECT 1;", "0002_b": "SELECT 1;"}))
    (tmp_path / "0002_b.sql").unlink()
    with pytest.raises(AffinodeError, match="has schema 2, this slurm-affinode knows up to 1"):
        migrations.upgrade(engine, tmp_path)


def test_later_migrations_are_applied_after_earlier_ones(engine, tmp_path):
    migrations.upgrade(engine, write(tmp_path, **{"0001_a": 'CREATE TABLE a ("x" VARCHAR(9));'}))
    write(tmp_path, **{"0002_b": "-- a comment; with a semicolon;\nINSERT INTO a VALUES ('100%;');\n\nDELETE FROM a\n"})
    write(tmp_path, **{"0003_c": "INSERT INTO a VALUES ('5%');"})
    assert [m.version for m in migrations.upgrade(engine, tmp_path)] == [2, 3]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT * FROM a")).scalars().all() == ["5%"]


def test_failed_migration_is_not_recorded(engine, tmp_path):
    write(tmp_path, **{"0001_a": 'CREATE TABLE IF NOT EXISTS a ("x" INT);', "0002_b": "CREATE NONSENSE;"})
    with pytest.raises(AffinodeError, match="database error"):
        migrations.upgrade(engine, tmp_path)
    write(tmp_path, **{"0002_b": "SELECT 1;"})
    assert migrations.upgrade(engine, tmp_path)[-1].version == 2


def test_file_for_one_database_replaces_the_common_one(tmp_path):
    write(tmp_path, **{"0001_a": "SELECT 1;", "0001_a__mariadb": "SELECT 2;", "0002_b": "SELECT 3;"})
    assert [m.statements for m in migrations.migrations("mariadb", tmp_path)] == [("SELECT 2",), ("SELECT 3",)]
    assert [m.statements for m in migrations.migrations("sqlite", tmp_path)] == [("SELECT 1",), ("SELECT 3",)]
    assert migrations.migrations("mariadb", tmp_path)[0].name == "0001_a"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"0001_a": "", "0003_c": ""}, "not numbered 1, 2, 3"),
        ({"0001_a": "", "0001_b": ""}, "its number is taken by 0001_a.sql"),
        ({"1_a": ""}, "not a name of a migration"),
    ],
)
def test_files_without_a_sequence_are_refused(tmp_path, files, message):
    with pytest.raises(AffinodeError, match=message):
        migrations.migrations("sqlite", write(tmp_path, **files))
