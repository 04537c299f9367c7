"""One way into the three databases: URLs, connections, the writer's lock, and errors as one clear line.

Writers take turns: a write transaction holds a lock of the whole store (SQLite ``BEGIN IMMEDIATE``, a PostgreSQL
advisory lock, MariaDB ``GET_LOCK``). What was there can then be read, merged and written without a race, and
ingests that run at once wait for each other in place of failing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from slurm_affinode.errors import AffinodeError, ConfigError, NoStoreError, UnreachableError, unwritable
from slurm_affinode.store import readonly
from slurm_affinode.store.faults import clean, is_transient, translate

T = TypeVar("T")

WRITER_WAIT_S = 600
"""How long a writer waits for the writers before it."""
ATTEMPTS = 5
"""How often a transaction that the server broke off (deadlock, serialization) is run before that is an error."""

_READ_ONLY = "affinode_read_only"
_POSTGRESQL_LOCK = 0x61666669  # "affi": any number that is the same in every process
_EXTRAS = {"psycopg": "postgresql", "psycopg2": "postgresql", "pymysql": "mariadb", "MySQLdb": "mariadb"}
_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mysql": "mariadb+pymysql",
    "mysql+pymysql": "mariadb+pymysql",
}


def parse_url(text_url: str) -> URL:
    """The SQLAlchemy URL of a store: ``postgresql://``, ``mariadb://``, ``mysql://``, ``sqlite:///FILE`` or a path.

    Raises ``ConfigError``; its message never holds the URL, which may hold a password.
    """
    given = text_url.strip()
    if not given:
        raise ConfigError("the URL of the store is empty", hint="leave it out to use SQLite in the state directory")
    if "://" not in given:
        return URL.create("sqlite", database=str(Path(given).expanduser()))
    if given.startswith("sqlite:///") and given != "sqlite:///:memory:":
        # Taken as it is: a directory may be called "50%" or "why?".
        return URL.create("sqlite", database=given.removeprefix("sqlite:///"))
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        url = None
    # With an @ in the password the rest of it would be a part of the host, which messages name.
    if url is None or "@" in (url.host or ""):
        raise ConfigError(
            "the URL of the store cannot be read",
            hint="write postgresql://USER@HOST/DATABASE, mariadb://USER@HOST/DATABASE or sqlite:////PATH/FILE; "
            "in a password, write @ : / as %40 %3A %2F",
        )
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    backend = url.get_backend_name()
    if backend == "sqlite":
        raise ConfigError(f"{url.drivername}: names no file", hint="name one: sqlite:////PATH/FILE")
    if backend not in ("postgresql", "mariadb"):
        raise ConfigError(f"{url.drivername}: not a database that can hold the store", hint=_known())
    if not url.database:
        raise ConfigError(f"{shown(url)}: names no database", hint=_known())
    return url.update_query_dict({"charset": "utf8mb4"}) if backend == "mariadb" else url


def _known() -> str:
    return "known: sqlite:////PATH/FILE, postgresql://USER@HOST/DATABASE, mariadb://USER@HOST/DATABASE"


def shown(url: URL) -> str:
    """``url`` for people: the path of SQLite, else without password and options."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    host = url.host or url.query.get("host") or url.query.get("unix_socket") or "local socket"
    where = host if isinstance(host, str) else ",".join(host)
    user = f"{url.username}@" if url.username else ""
    port = f":{url.port}" if url.port else ""
    return clean(f"{url.get_backend_name()}://{user}{where}{port}/{url.database}")


def connect(url: URL, *, create: bool = True) -> Engine:
    """An engine for ``url``. No server is contacted yet.

    The directory of a SQLite file is made; with ``create`` off, a file that is not there is a ``NoStoreError``. Raises
    ``ConfigError`` for an URL that names no database, ``UnreachableError`` where its driver is not installed.
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
        raise ConfigError(f"{url.drivername}: no such database driver", hint=_known()) from error
    except (SQLAlchemyError, TypeError) as error:
        raise ConfigError(f"{shown(url)}: cannot be used: {clean(str(error))}") from error

    @event.listens_for(engine, "do_connect")
    def with_known_options(dialect: Any, _record: object, arguments: Any, options: Any) -> Any:
        try:
            return dialect.connect(*arguments, **options)
        except TypeError as error:  # as of any function that does not know an argument
            raise ConfigError(
                f"{shown(url)}: cannot be used: {clean(str(error))}", hint="see what stands behind the ? of the URL"
            ) from error

    return engine


def _sqlite(url: URL, *, create: bool) -> Engine:
    path = Path(str(url.database))
    if not create and not path.exists():
        raise NoStoreError(
            f"{path}: there is no store",
            hint="is that the right --state or --db? The first ingest makes it: slurm-affinode ingest sacct --since 7d",
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
    # NullPool: a connection closes its file as soon as it is done, so that nothing keeps the write-ahead log open.
    if readonly.may_not_write(path):
        engine = create_engine(
            url, poolclass=NullPool, creator=lambda: readonly.connect(path, WRITER_WAIT_S),
            execution_options={_READ_ONLY: True},
        )  # fmt: skip
    else:
        engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": WRITER_WAIT_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _give_to_owner_of_directory(path: Path) -> None:
    """Make the file, where it is missing, the property of whom its directory belongs to.

    Where root is the first to write into the store of a user, that user could never write to it otherwise. What SQLite
    makes beside the file later, it gives to the file's owner itself.
    """
    with contextlib.suppress(OSError):  # SQLite says better what is wrong; a file or link that is there stays as it is
        directory = path.parent.stat()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchown(file, directory.st_uid, directory.st_gid)
        finally:
            os.close(file)


def _prepare_sqlite(raw: sqlite3.Connection, _record: object) -> None:
    # The driver must not open transactions of its own: "begin" below says which kind it is to be.
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
    """Readers then never wait for a writer. Changing the mode ignores the busy timeout, hence the loop.

    A file system or a user that cannot have a write-ahead log (read-only) goes on with the mode that there is.
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
    """Turn what the driver raises into one clear line of ours."""
    try:
        yield
    except DBAPIError as error:
        raise translate(error, engine.dialect.name, shown(engine.url)) from error
    except SQLAlchemyError as error:
        raise AffinodeError(f"{shown(engine.url)}: {clean(str(error))}") from error


@contextlib.contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A read transaction."""
    read_only = engine.get_execution_options().get(_READ_ONLY)
    still = readonly.unchanged(Path(str(engine.url.database))) if read_only else contextlib.nullcontext()
    with translated(engine), still, engine.connect() as connection, connection.begin():
        yield connection


def write(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run ``work`` in one write transaction as the only writer; run it again where the server broke it off."""
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
    # The lock belongs to the session, not to the transaction: taken before it begins, given back after it ended.
    name = f"slurm-affinode/{engine.url.database}"[:64]
    with connection.begin():
        asked: dict[str, Any] = {"name": name, "wait": WRITER_WAIT_S}
        got = connection.execute(text("SELECT GET_LOCK(:name, :wait)"), asked).scalar()
    if got != 1:
        raise UnreachableError(f"{shown(engine.url)}: another writer has held the store for {WRITER_WAIT_S} s")
    try:
        with connection.begin():
            yield
    finally:
        if not connection.invalidated:
            with connection.begin():
                connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": name})
