"""A SQLite database that its reader may not write to."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.checkpoint.user_files import User, as_user
from slurm_affinode.db import engine, migrations
from slurm_affinode.db.engine import reading
from slurm_affinode.db.repository import Repository

STRANGER = 64123


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a database with one value."""
    path = tmp_path / "why?#50%" / "affinode.sqlite"
    with Repository.open(str(path)) as opened:
        opened.set("name", "old")
    return path


@pytest.fixture
def reader(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """Return a repository opened without the permission to write; the tests may run as root, which always has it."""
    monkeypatch.setattr(engine, "may_not_write", lambda path: path == store)
    with Repository.open(str(store), create=False) as opened:
        yield opened
    monkeypatch.undo()


def test_read_only_database_is_readable(reader: Repository, store: Path) -> None:
    """No file is created next to it, and a write is refused with a hint."""
    assert (reader.get("name"), migrations.status(reader.engine).pending) == ("old", ())
    assert [path.name for path in store.parent.iterdir()] == ["affinode.sqlite"]
    with pytest.raises(UnreachableError, match="cannot be written") as refused:
        reader.set("name", "new")
    assert refused.value.hint == "run as the user who owns it"
    assert reader.get("name") == "old"


def test_write_ahead_log_of_a_writer_is_read(reader: Repository, store: Path) -> None:
    """The rows are not in the main file yet."""
    with closing(sqlite3.connect(store)) as writer:
        before = store.read_bytes()
        writer.execute("CREATE TABLE fresh (value)")
        writer.execute("INSERT INTO fresh VALUES (7)")
        writer.commit()
        assert store.read_bytes() == before
        with reading(reader.engine) as connection:
            assert connection.exec_driver_sql("SELECT value FROM fresh").scalar() == 7


def test_file_changed_during_a_read_is_an_error(reader: Repository, store: Path) -> None:
    """Pages of two states may have been read."""

    def read_slowly() -> None:
        with reading(reader.engine), closing(sqlite3.connect(store)) as writer:
            writer.execute("CREATE TABLE fresh (value)")
            writer.commit()

    with pytest.raises(UnreachableError, match="was written to while it was read"):
        read_slowly()
    assert reader.get("name") == "old"


def test_permissions_decide_about_write_access() -> None:
    """Both the file and its directory count; a file that is missing or unreadable is a different error."""
    with tempfile.TemporaryDirectory() as made:
        directory, file = Path(made), Path(made) / "store"
        file.touch()
        if os.geteuid() == 0:
            os.chown(directory, STRANGER, STRANGER)
            os.chown(file, STRANGER, STRANGER)
            os.seteuid(STRANGER)
        try:
            assert not engine.may_not_write(file)
            file.chmod(0o400)
            assert engine.may_not_write(file)
            file.chmod(0o600)
            directory.chmod(0o500)
            assert engine.may_not_write(file)
            assert not engine.may_not_write(directory / "none")
            file.chmod(0o200)
            assert not engine.may_not_write(file)
        finally:
            directory.chmod(0o700)
            os.seteuid(os.getuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts with the rights of another user")
def test_database_in_closed_directory_is_reported(store: Path) -> None:
    """One line with the path, as for a database that cannot be opened: callers may then use another source."""
    store.parent.chmod(0o700)
    with pytest.raises(UnreachableError, match=r"affinode.sqlite: cannot be read: Permission denied"):
        as_user(User(STRANGER, STRANGER), lambda: Repository.open(str(store), create=False))
