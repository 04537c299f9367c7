"""Real database servers for tests: a private PostgreSQL and a private MariaDB, started by the test run.

Each listens on a Unix socket in its own directory and is ended by its process ID. If the programs are not installed,
the tests that need them are skipped with the reason; with ``CI=true`` in the environment they fail.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from background import running
from sqlalchemy import URL, create_engine, text
from sqlalchemy.exc import OperationalError

START_S = 60


def program_of(name: str, *patterns: str) -> str:
    """Return the path of ``name``: on PATH, in the sbin directories, or by ``patterns`` (globs below /)."""
    path = os.environ.get("PATH", "") + os.pathsep + os.pathsep.join(("/usr/sbin", "/usr/local/sbin", "/sbin"))
    result = shutil.which(name, path=path)
    if result is None:
        result = next((str(p) for pattern in patterns for p in sorted(Path("/").glob(pattern), reverse=True)), None)
    if result is None:
        reason = f"{name} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return result


def _unprivileged(*users: str) -> tuple[str, ...]:
    """Return arguments that run a program as the first existing of ``users``: servers refuse to run as root."""
    if os.geteuid() != 0:
        return ()
    known = {entry.pw_name for entry in pwd.getpwall()}
    user = next(name for name in (*users, "nobody") if name in known)
    return ("setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups")


def _hand_over(directory: Path, prefix: Sequence[str]) -> None:
    user = next((word.removeprefix("--reuid=") for word in prefix if word.startswith("--reuid=")), None)
    if user is not None:
        shutil.chown(directory, user)


def _run(argv: Sequence[str], cwd: Path) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, cwd=cwd, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"


@contextlib.contextmanager
def _server(argv: Sequence[str], cwd: Path, url: URL, listening: Path) -> Iterator[None]:
    """Run ``argv`` until the block ends; the block starts once ``url`` responds at the socket ``listening``."""
    with running(argv, cwd / "server.log", cwd) as process:
        _await(url, listening, process, cwd / "server.log")
        yield


def _await(url: URL, listening: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    engine = create_engine(url)
    deadline = time.monotonic() + START_S
    try:
        while True:
            try:
                # Connect without PyMySQL first: it leaks its socket if nothing listens.
                with socket.socket(socket.AF_UNIX) as asking:
                    asking.connect(str(listening))
                with engine.connect():
                    return
            except (OperationalError, OSError):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{process.args}: {log.read_text(errors='replace')}")
                time.sleep(0.05)
    finally:
        engine.dispose()


@contextlib.contextmanager
def _directory(prefix: Sequence[str]) -> Iterator[Path]:
    # Not pytest's tmp_path: socket paths are limited to about 100 bytes, and its parents are closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="affinode-db-"))
    try:
        directory.chmod(0o755)
        _hand_over(directory, prefix)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[URL]:
    """A PostgreSQL server; the URL names its database ``postgres``."""
    initdb = program_of("initdb", "usr/lib/postgresql/*/bin/initdb", "usr/pgsql-*/bin/initdb")
    postgres = program_of("postgres", "usr/lib/postgresql/*/bin/postgres", "usr/pgsql-*/bin/postgres")
    prefix = _unprivileged("postgres")
    with _directory(prefix) as directory:
        data = directory / "data"
        _run(
            [*prefix, initdb, "-D", str(data), "-U", "affinode", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"],
            directory,
        )
        argv = [*prefix, postgres, "-D", str(data), "-k", str(directory), "-c", "listen_addresses=", "-F"]
        query = {"host": str(directory)}
        url = URL.create("postgresql+psycopg", username="affinode", database="postgres", query=query)
        with _server(argv, directory, url, directory / ".s.PGSQL.5432"):
            yield url


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[URL]:
    """A MariaDB server with the character set that distributions default to; the URL names its database ``mysql``."""
    install = program_of("mariadb-install-db")
    mariadbd = program_of("mariadbd")
    prefix = _unprivileged("mysql")
    with _directory(prefix) as directory:
        data = directory / "data"
        common = [f"--datadir={data}", "--innodb-flush-method=fsync"]
        options = ["--auth-root-authentication-method=normal", "--skip-test-db", f"--tmpdir={directory}"]
        _run([*prefix, install, "--no-defaults", *common, *options], directory)
        listening = directory / "mysqld.sock"
        argv = [*prefix, mariadbd, "--no-defaults", *common, f"--socket={listening}", "--skip-networking"]
        argv += [f"--tmpdir={directory}", "--character-set-server=latin1", "--innodb-flush-log-at-trx-commit=0"]
        url = URL.create("mariadb+pymysql", username="root", database="mysql", query={"unix_socket": str(listening)})
        with _server(argv, directory, url, listening):
            yield url


@contextlib.contextmanager
def _database(server: URL, name: str) -> Iterator[str]:
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        yield server.set(database=name).render_as_string(hide_password=False)
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name}"))
    finally:
        engine.dispose()


@pytest.fixture(scope="session")
def _database_name() -> Callable[[], str]:
    numbers = iter(range(1, 1_000_000))
    return lambda: f"affinode_{next(numbers)}"


@pytest.fixture
def postgresql_url(postgresql_server: URL, _database_name: Callable[[], str]) -> Iterator[str]:
    """An empty PostgreSQL database."""
    with _database(postgresql_server, _database_name()) as url:
        yield url


@pytest.fixture
def mariadb_url(mariadb_server: URL, _database_name: Callable[[], str]) -> Iterator[str]:
    """An empty MariaDB database."""
    with _database(mariadb_server, _database_name()) as url:
        yield url


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.database),
        pytest.param("mariadb", marks=pytest.mark.database),
    ]
)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each of the three kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'affinode.sqlite'}"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
