"""One interface to SQLite, PostgreSQL and MariaDB: URLs, connections, the write lock, errors in one line.

Writers take turns: a write transaction holds a lock on the whole database (SQLite ``BEGIN IMMEDIATE``, a PostgreSQL
advisory lock, MariaDB ``GET_LOCK``). Rows can then be read, merged and written without a race, and concurrent ingests
wait instead of failing.

A SQLite file may be read-only for this user: one user runs ``nightly``, others read. Even to read a file with a
write-ahead log, SQLite writes beside it. If it cannot and there is no log, the file is opened as immutable and checked
for changes afterwards (``unchanged``). While a writer has a log open, SQLite reads both.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from slurm_affinode.base.errors import (
    AffinodeError,
    ConfigError,
    DiskError,
    InputError,
    NoStoreError,
    UnreachableError,
    unwritable,
)
from slurm_affinode.base.text import escaped, one_line

_MARIADB_TRANSIENT = {1205, 1213}  # lock wait timeout, deadlock
_POSTGRESQL_TRANSIENT = {"40001", "40P01"}  # serialization failure, deadlock
_MARIADB_DENIED = {1044, 1045, 1142, 1227, 1698}
_MARIADB_FULL = {1021, 1114}


def is_transient(error: DBAPIError) -> bool:
    """Return whether the server aborted the transaction in favor of another one, so that a retry can succeed."""
    return _sqlstate(error) in _POSTGRESQL_TRANSIENT or _errno(error) in _MARIADB_TRANSIENT


def translate(error: DBAPIError, dialect: str, where: str) -> AffinodeError:
    """Convert ``error`` to an ``AffinodeError``; ``where`` names the database in its message."""
    if dialect == "sqlite":
        return _sqlite_error(one_line(error.orig), where, getattr(error.orig, "sqlite_errorname", ""))
    message = _message(error)
    state, number = _sqlstate(error), _errno(error)
    if state == "42501" or number in _MARIADB_DENIED or (state or "").startswith("28"):
        return UnreachableError(f"{where}: not allowed: {message}", hint="check the user, the password and its rights")
    if state == "53100" or number in _MARIADB_FULL:
        return DiskError(f"{where}: the disk of the server is full: {message}")
    if is_transient(error):
        return UnreachableError(f"{where}: the lock is held by other writers: {message}", hint="try again")
    if error.connection_invalidated or _is_connection(error):
        return UnreachableError(
            f"{where}: cannot be reached: {message}", hint="is the server running, is the URL right?"
        )
    return AffinodeError(f"{where}: database error: {message}")


def _sqlite_error(message: str, path: str, name: str) -> AffinodeError:
    low = message.lower()
    if "not a database" in low or "malformed" in low:
        return InputError(
            "is damaged, or is not a SQLite database", where=path,
            hint="restore it from a copy, or move it away and ingest everything again",
        )  # fmt: skip
    if "readonly" in low or "read-only" in low:
        return UnreachableError(
            f"{path}: cannot be written: it, or its directory, is read-only",
            hint="run as the user who owns it",
        )
    if "full" in low or name == "SQLITE_IOERR_SHMSIZE":  # no room for the index of the write-ahead log
        return DiskError(f"{path}: the disk is full", hint="nothing was changed; make room and run it again")
    if "locked" in low or "busy" in low:
        return UnreachableError(f"{path}: another process has kept it locked", hint="try again when that one is done")
    if "unable to open" in low:
        return UnreachableError(f"{path}: cannot be opened", hint="check that you may read and write its directory")
    if "i/o error" in low:
        return DiskError(f"{path}: disk error: {message}")
    return AffinodeError(f"{path}: database error: {message}")


def _message(error: DBAPIError) -> str:
    orig = error.orig
    arguments: tuple[object, ...] = getattr(orig, "args", ())
    if len(arguments) == 2 and isinstance(arguments[0], int):  # PyMySQL: (number, text)
        return one_line(arguments[1])
    lines = str(orig).strip().splitlines()
    return one_line(lines[0]) if lines else type(orig).__name__


def _sqlstate(error: DBAPIError) -> str | None:
    state = getattr(error.orig, "sqlstate", None)
    return state if isinstance(state, str) else None


def _errno(error: DBAPIError) -> int | None:
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def _is_connection(error: DBAPIError) -> bool:
    number = _errno(error)
    if number is not None:
        return 2000 <= number < 3000 or number in (0, 1040, 1049, 1053, 1129, 1130, 1203)
    state = _sqlstate(error)
    return state is None or state[:2] in ("08", "57", "53", "3D")


_LOGS = ("-wal", "-journal")


def may_not_write(path: Path) -> bool:
    """Return whether ``path`` is a readable file, but it or its directory is not writable."""
    return os.access(path, os.R_OK, effective_ids=True) and not all(
        os.access(place, os.W_OK, effective_ids=True) for place in (path, path.parent)
    )


def connect_read_only(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Open a connection that never writes."""
    mode = "mode=ro" if _logged(path) else "mode=ro&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", timeout_s, uri=True)


@contextlib.contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Raise ``UnreachableError`` if a writer changed the file meanwhile: the data read may mix two states."""
    if _logged(path):
        yield
        return
    before = _state(path)
    try:
        yield
    finally:  # the change may also have caused an error
        if _state(path) != before:
            raise UnreachableError(f"{path}: was written to while it was read", hint="run it again")


def _logged(path: Path) -> bool:
    return any(Path(f"{path}{log}").exists() for log in _LOGS)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # SQLite reports the reason
    return status.st_ino, status.st_size, status.st_mtime_ns


T = TypeVar("T")

WRITER_WAIT_S = 600
"""How long a writer waits for other writers."""
ATTEMPTS = 5
"""Attempts before a transaction that the server aborts (deadlock, serialization failure) is an error."""

_READ_ONLY = "affinode_read_only"
_POSTGRESQL_LOCK = 0x61666669  # "affi"; any number shared by all processes will do
_EXTRAS = {"psycopg": "postgresql", "psycopg2": "postgresql", "pymysql": "mariadb", "MySQLdb": "mariadb"}
_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mysql": "mariadb+pymysql",
    "mysql+pymysql": "mariadb+pymysql",
}


def parse_url(text_url: str) -> URL:
    """Parse the URL of a database: ``postgresql://``, ``mariadb://``, ``mysql://``, ``sqlite:///FILE`` or a path.

    Raises ``ConfigError``; its message never contains the URL, which may contain a password.
    """
    url_text = text_url.strip()
    if not url_text:
        raise ConfigError("the URL of the database is empty", hint="leave it out to use SQLite in the state directory")
    if "://" not in url_text:
        return URL.create("sqlite", database=str(Path(url_text).expanduser()))
    if url_text.startswith("sqlite:///") and url_text != "sqlite:///:memory:":
        # Not decoded: a directory may be called "50%" or "why?".
        return URL.create("sqlite", database=url_text.removeprefix("sqlite:///"))
    try:
        url = make_url(url_text)
    except (ArgumentError, ValueError):
        url = None
    # After an @ in the password, the rest of it would be part of the host, which messages show.
    if url is None or "@" in (url.host or ""):
        raise ConfigError(
            "the URL of the database cannot be read",
            hint="write postgresql://USER@HOST/DATABASE, mariadb://USER@HOST/DATABASE or sqlite:////PATH/FILE; "
            "in a password, write @ : / as %40 %3A %2F",
        )
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    backend = url.get_backend_name()
    if backend == "sqlite":
        raise ConfigError(f"{url.drivername}: names no file", hint="name one: sqlite:////PATH/FILE")
    if backend not in ("postgresql", "mariadb"):
        raise ConfigError(f"{url.drivername}: is not a supported database", hint=_known_urls())
    if not url.database:
        raise ConfigError(f"{shown(url)}: names no database", hint=_known_urls())
    return url.update_query_dict({"charset": "utf8mb4"}) if backend == "mariadb" else url


def _known_urls() -> str:
    return "known: sqlite:////PATH/FILE, postgresql://USER@HOST/DATABASE, mariadb://USER@HOST/DATABASE"


def shown(url: URL) -> str:
    """Return ``url`` for messages: the path for SQLite, else the URL without password and options."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    host = url.host or url.query.get("host") or url.query.get("unix_socket") or "local socket"
    where = host if isinstance(host, str) else ",".join(host)
    user = f"{url.username}@" if url.username else ""
    port = f":{url.port}" if url.port else ""
    return escaped(f"{url.get_backend_name()}://{user}{where}{port}/{url.database}")


def connect(url: URL, *, create: bool = True) -> Engine:
    """Create an engine for ``url``. No server is contacted yet.

    The directory of a SQLite file is created; with ``create`` off, a missing file raises ``NoStoreError``. Raises
    ``ConfigError`` for an unusable URL, ``UnreachableError`` if the driver is not installed.
    """
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, create=create)
    try:
        if url.get_backend_name() == "postgresql":
            engine = create_engine(url, pool_size=2, connect_args={"connect_timeout": 15})
        else:
            arguments = {"connect_timeout": 15, "init_command": "SET sql_mode = 'STRICT_ALL_TABLES,ANSI_QUOTES'"}
            engine = create_engine(url, pool_size=2, isolation_level="READ COMMITTED", connect_args=arguments)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        hint = f"pip install 'slurm-affinode[{extra}]'" if extra else None
        raise UnreachableError(f"{shown(url)}: the Python module {error.name} is missing", hint=hint) from error
    except NoSuchModuleError as error:
        raise ConfigError(f"{url.drivername}: no such database driver", hint=_known_urls()) from error
    except (SQLAlchemyError, TypeError) as error:
        raise ConfigError(f"{shown(url)}: cannot be used: {one_line(error)}") from error

    @event.listens_for(engine, "do_connect")
    def with_known_options(dialect: Any, _record: object, arguments: Any, options: Any) -> Any:
        try:
            return dialect.connect(*arguments, **options)
        except TypeError as error:  # an unknown option is an unexpected argument
            raise ConfigError(
                f"{shown(url)}: cannot be used: {one_line(error)}", hint="check the options after the ? of the URL"
            ) from error

    return engine


def _sqlite(url: URL, *, create: bool) -> Engine:
    path = Path(str(url.database))
    try:
        exists = path.exists()
    except OSError as error:  # the directory is closed to this user
        raise UnreachableError(f"{path}: cannot be read: {error.strerror}") from error
    if not create and not exists:
        raise NoStoreError(
            f"{path}: there is no database",
            hint="is that the right --state or --db? On a new machine: slurm-affinode setup report, or an ingest such "
            "as: slurm-affinode ingest sacct --since 7d",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "give --state a directory that you may write to"
        raise unwritable(path.parent, error, hint=hint, doing="made") from error
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; a SQLite file is needed", hint="add the name of a file")
    if create and os.geteuid() == 0:
        _give_to_owner_of_directory(path)
    # NullPool closes the file after each connection, so that the write-ahead log is not kept open.
    if may_not_write(path):
        engine = create_engine(
            url, poolclass=NullPool, creator=lambda: connect_read_only(path, WRITER_WAIT_S),
            execution_options={_READ_ONLY: True},
        )  # fmt: skip
    else:
        engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": WRITER_WAIT_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _give_to_owner_of_directory(path: Path) -> None:
    """Create a missing file with the owner of its directory.

    Otherwise, if root is the first to write to a user's database, that user could never write to it. Files that SQLite
    creates beside it later get the owner of the database file.
    """
    with contextlib.suppress(OSError):  # SQLite reports errors better; an existing file or link is left alone
        directory = path.parent.stat()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchown(file, directory.st_uid, directory.st_gid)
        finally:
            os.close(file)


def _prepare_sqlite(raw: sqlite3.Connection, _record: object) -> None:
    # The driver must not open transactions implicitly: ``_begin_sqlite`` chooses their kind.
    raw.isolation_level = None
    cursor = raw.cursor()
    try:
        cursor.execute("PRAGMA temp_store = MEMORY")
        cursor.execute("PRAGMA cache_size = -65536")
        if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            _use_wal(cursor)
    finally:
        cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Switch to a write-ahead log: readers then never wait for a writer.

    Changing the mode ignores the busy timeout, hence the loop. If there can be no write-ahead log (read-only file
    system or user), the current mode is kept.
    """
    for attempt in range(50):
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                return
            time.sleep(0.01 * (attempt + 1))
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    writing = connection.get_execution_options().get("affinode_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


@contextlib.contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Convert errors of the driver to ``AffinodeError`` with a one-line message."""
    try:
        yield
    except DBAPIError as error:
        raise translate(error, engine.dialect.name, shown(engine.url)) from error
    except SQLAlchemyError as error:
        raise AffinodeError(f"{shown(engine.url)}: {one_line(error)}") from error


@contextlib.contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a read transaction."""
    read_only = engine.get_execution_options().get(_READ_ONLY)
    still = unchanged(Path(str(engine.url.database))) if read_only else contextlib.nullcontext()
    with translated(engine), still, engine.connect() as connection, connection.begin():
        yield connection


def write(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run ``work`` in one write transaction as the only writer; retry it if the server aborts it."""
    with translated(engine):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with _writing(engine) as connection:
                    return work(connection)
            except DBAPIError as error:
                if attempt == ATTEMPTS or not is_transient(error):
                    raise
                time.sleep(0.05 * 2**attempt)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _writing(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            immediate = connection.execution_options(affinode_write=True)
            with immediate.begin():
                yield immediate
        elif engine.dialect.name == "postgresql":
            with connection.begin():
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _POSTGRESQL_LOCK})
                yield connection
        else:
            with _mariadb_lock(connection, engine):
                yield connection


@contextlib.contextmanager
def _mariadb_lock(connection: Connection, engine: Engine) -> Iterator[None]:
    # The lock belongs to the session: it is acquired before the transaction begins and released after it has ended.
    name = f"slurm-affinode/{engine.url.database}"[:64]
    with connection.begin():
        parameters: dict[str, Any] = {"name": name, "wait": WRITER_WAIT_S}
        got = connection.execute(text("SELECT GET_LOCK(:name, :wait)"), parameters).scalar()
    if got != 1:
        raise UnreachableError(f"{shown(engine.url)}: another writer has locked the database for {WRITER_WAIT_S} s")
    try:
        with connection.begin():
            yield
    finally:
        if not connection.invalidated:
            with connection.begin():
                connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": name})
