"""Errors of the database: one line with a hint, never with a password."""

from __future__ import annotations

import sqlite3
import sys

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError

from slurm_affinode.base.errors import AffinodeError, ConfigError, DiskError, InputError, UnreachableError
from slurm_affinode.db import engine as engines
from slurm_affinode.db.engine import connect, is_transient, parse_url, shown, translate, write
from slurm_affinode.db.repository import Repository


@pytest.mark.parametrize(
    ("text", "driver", "people"),
    [
        ("/var/lib/a.sqlite", "sqlite", "/var/lib/a.sqlite"),
        ("sqlite:////var/lib/a.sqlite", "sqlite", "/var/lib/a.sqlite"),
        ("a.db", "sqlite", "a.db"),
        ("sqlite:////srv/50%/why?/a#b.sqlite", "sqlite", "/srv/50%/why?/a#b.sqlite"),
        ("postgresql://u:s3cret@h/d", "postgresql+psycopg", "postgresql://u@h/d"),
        ("postgres://u:s3cret@h:99/d", "postgresql+psycopg", "postgresql://u@h:99/d"),
        ("postgresql:///d?host=/run/pg&password=s3cret", "postgresql+psycopg", "postgresql:///run/pg/d"),
        ("mysql://u:s3cret@h/d", "mariadb+pymysql", "mariadb://u@h/d"),
        ("mariadb://h/d?unix_socket=/s&password=s3cret", "mariadb+pymysql", "mariadb://h/d"),
        ("mysql+pymysql:///d", "mariadb+pymysql", "mariadb://local socket/d"),
    ],
)
def test_urls_choose_the_driver_and_are_shown_without_password(text, driver, people):
    url = parse_url(text)
    assert url.drivername == driver
    assert shown(url) == people
    assert "s3cret" not in shown(url)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql://u:s3cret@h:port/d", "cannot be read"),
        ("postgresql://u:pass@s3cret@h/d", "cannot be read"),
        ("postgresql://u:s3cret@h", "names no database"),
        ("oracle://u:s3cret@h/d", "oracle: is not a supported database"),
        ("://", "cannot be read"),
    ],
)
def test_invalid_url_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_url(text)
    assert "s3cret" not in f"{caught.value}{caught.value.hint}"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("postgresql://h/d", "psycopg", "postgresql"), ("mariadb://h/d", "pymysql", "mariadb")],
)
def test_missing_driver_names_the_package_to_install(monkeypatch, url, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnreachableError, match=f"the Python module {module} is missing") as caught:
        Repository.open(url)
    assert caught.value.hint == f"pip install 'slurm-affinode[{extra}]'"


def test_unknown_driver_is_refused():
    with pytest.raises(ConfigError, match="no such database driver"):
        connect(parse_url("postgresql+nothing://h/d"))


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb"])
def test_server_that_does_not_respond_is_unreachable(scheme):
    with pytest.raises(UnreachableError, match=f"{scheme}://u@127.0.0.1:1/d: cannot be reached") as caught:
        Repository.open(f"{scheme}://u:s3cret@127.0.0.1:1/d")
    assert "s3cret" not in f"{caught.value}{caught.value.hint}"
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.database
def test_missing_database_or_user_is_reported(postgresql_url, mariadb_url):
    for url, user in ((postgresql_url, "affinode"), (mariadb_url, "root")):
        with pytest.raises(UnreachableError, match="nowhere"):
            Repository.open(url.replace("/affinode_", "/nowhere_"))
        with pytest.raises(UnreachableError, match="stranger"):
            Repository.open(url.replace(f"{user}@", "stranger:s3cret@"))


def test_file_that_is_not_a_database_is_named(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"sacct output, by mistake\n" * 100)
    with pytest.raises(InputError, match="is damaged, or is not a SQLite database") as caught:
        Repository.open(str(path))
    assert str(path) in str(caught.value)
    assert path.read_bytes().startswith(b"sacct output")


def test_damaged_file_is_named(tmp_path):
    path = tmp_path / "a.sqlite"
    Repository.open(str(path)).close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(InputError, match="is damaged"), Repository.open(str(path)) as repository:
        repository.counts()


def test_directory_or_file_in_the_path_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is a directory"):
        Repository.open(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UnreachableError, match="cannot be made"):
        Repository.open(str(tmp_path / "file" / "a.sqlite"))


def test_full_disk_is_one_line_and_changes_nothing(tmp_path):
    with Repository.open(str(tmp_path / "a.sqlite")) as repository:

        @event.listens_for(repository.engine, "connect")
        def shrink(raw: sqlite3.Connection, _record: object) -> None:
            raw.execute("PRAGMA max_page_count = 1")

        with pytest.raises(DiskError, match="the disk is full"):
            repository.set("x", "y" * 10_000_000)
        assert repository.get("x") is None


def test_sqlite_lock_timeout_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "WRITER_WAIT_S", 0)
    path = tmp_path / "a.sqlite"
    with Repository.open(str(path)) as repository:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnreachableError, match="another process has kept it locked"):
            repository.set("x", "y")
        other.close()


@pytest.mark.database
def test_mariadb_lock_timeout_is_reported(mariadb_url, monkeypatch):
    with Repository.open(mariadb_url) as repository, Repository.open(mariadb_url) as other:
        monkeypatch.setattr(engines, "WRITER_WAIT_S", 0)

        def held(_connection):
            with pytest.raises(UnreachableError, match="another writer has locked the database"):
                other.set("x", "y")

        write(repository.engine, held)
        other.set("x", "z")
        assert repository.get("x") == "z"


def _sqlite_without_room() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"  # Linux returns it for a file in WAL mode on a full file system
    return error


def _error(orig: Exception, *, invalidated: bool = False) -> DBAPIError:
    return OperationalError("select", {}, orig, connection_invalidated=invalidated)


class _Postgres(Exception):  # noqa: N818 - stands for the driver's class
    def __init__(self, sqlstate: str | None, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("orig", "dialect", "kind", "message"),
    [
        (_Postgres("42501", "permission denied for table jobs"), "postgresql", UnreachableError, "not allowed"),
        (_Postgres("53100", "could not extend file"), "postgresql", DiskError, "disk of the server is full"),
        (_Postgres("40P01", "deadlock detected"), "postgresql", UnreachableError, "other writers"),
        (_Postgres("08006", "gone\nDETAIL: x"), "postgresql", UnreachableError, "cannot be reached: gone$"),
        (_Postgres("42P01", "no such table"), "postgresql", AffinodeError, "database error: no such table"),
        (_Postgres(None, ""), "postgresql", UnreachableError, "cannot be reached: _Postgres"),
        (Exception(1142, "INSERT command denied"), "mariadb", UnreachableError, "not allowed: INSERT"),
        (Exception(1114, "table is full"), "mariadb", DiskError, "disk of the server is full"),
        (Exception(1205, "Lock wait timeout"), "mariadb", UnreachableError, "other writers"),
        (Exception(2013, "Lost connection"), "mariadb", UnreachableError, "cannot be reached: Lost"),
        (Exception(1146, "no such table"), "mariadb", AffinodeError, "database error: no such table"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "sqlite", UnreachableError, "read-only"),
        (sqlite3.OperationalError("unable to open database file"), "sqlite", UnreachableError, "cannot be opened"),
        (sqlite3.OperationalError("disk I/O error"), "sqlite", DiskError, "disk error"),
        (_sqlite_without_room(), "sqlite", DiskError, "the disk is full"),
        (sqlite3.IntegrityError("NOT NULL failed"), "sqlite", AffinodeError, "database error"),
    ],
)
def test_each_kind_of_error_is_translated(orig, dialect, kind, message):
    error = translate(_error(orig), dialect, "where")
    assert type(error) is kind
    with pytest.raises(AffinodeError, match=message):
        raise error


def test_transaction_aborted_by_the_server_is_retried(tmp_path, monkeypatch):
    monkeypatch.setattr(engines.time, "sleep", lambda _seconds: None)
    deadlock = _error(Exception(1213, "Deadlock found"))
    assert is_transient(deadlock)
    tries = []

    def work(_connection):
        tries.append(1)
        if len(tries) < 3:
            raise deadlock
        return "done"

    with Repository.open(str(tmp_path / "a.sqlite")) as repository:
        assert write(repository.engine, work) == "done"
        with pytest.raises(AffinodeError, match="Deadlock"):
            write(repository.engine, lambda _connection: (_ for _ in ()).throw(deadlock))


def test_unknown_option_in_the_url_is_reported_in_one_line():
    pytest.importorskip("pymysql")
    with (
        pytest.raises(ConfigError, match=r"mariadb://u@127\.0\.0\.1:1/x\S*: cannot be used: .*'foo'"),
        Repository.open("mariadb://u:secret@127.0.0.1:1/x?foo=bar"),
    ):
        pass
