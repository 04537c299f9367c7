"""A SQLite store that the reader may not write."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slurm_affinode.errors import UnreachableError
from slurm_affinode.store import readonly
from slurm_affinode.store.engine import reading
from slurm_affinode.store.repository import Repository

STRANGER = 64123


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one value in it."""
    path = tmp_path / "why?#50%" / "affinode.sqlite"
    with Repository.open(str(path)) as opened:
        opened.set("name", "old")
    return path


@pytest.fixture
def reader(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """Of one who may not write; the tests themselves may run as root, who may."""
    monkeypatch.setattr(readonly, "may_not_write", lambda path: path == store)
    with Repository.open(str(store), create=False) as opened:
        yield opened
    monkeypatch.undo()


def test_who_may_read_reads(reader: Repository, store: Path) -> None:
    """Nothing appears beside the file, and a write is refused with what to do."""
    assert (reader.get("name"), reader.schema().pending) == ("old", ())
    assert [path.name for path in store.parent.iterdir()] == ["affinode.sqlite"]
    with pytest.raises(UnreachableError, match="cannot be written") as refused:
        reader.set("name", "new")
    assert refused.value.hint == "run as the user who owns it"
    assert reader.get("name") == "old"


def test_what_a_writer_has_in_its_log_is_read_too(reader: Repository, store: Path) -> None:
    """It is not yet in the file."""
    with closing(sqlite3.connect(store)) as writer:
        before = store.read_bytes()
        writer.execute("CREATE TABLE fresh (value)")
        writer.execute("INSERT INTO fresh VALUES (7)")
        writer.commit()
        assert store.read_bytes() == before
        with reading(reader.engine) as connection:
            assert connection.exec_driver_sql("SELECT value FROM fresh").scalar() == 7


def test_a_file_that_changes_under_the_reader_is_no_answer(reader: Repository, store: Path) -> None:
    """A writer came and went: pages of two states may have been read."""

    def read_slowly() -> None:
        with reading(reader.engine), closing(sqlite3.connect(store)) as writer:
            writer.execute("CREATE TABLE fresh (value)")
            writer.commit()

    with pytest.raises(UnreachableError, match="was written to while it was read"):
        read_slowly()
    assert reader.get("name") == "old"


def test_the_permissions_tell_who_may_not_write() -> None:
    """The file and its directory both; a file that is not there, or cannot be read, is another matter."""
    with tempfile.TemporaryDirectory() as made:
        directory, file = Path(made), Path(made) / "store"
        file.touch()
        if os.geteuid() == 0:
            os.chown(directory, STRANGER, STRANGER)
            os.chown(file, STRANGER, STRANGER)
            os.seteuid(STRANGER)
        try:
            assert not readonly.may_not_write(file)
            file.chmod(0o400)
            assert readonly.may_not_write(file)
            file.chmod(0o600)
            directory.chmod(0o500)
            assert readonly.may_not_write(file)
            assert not readonly.may_not_write(directory / "none")
            file.chmod(0o200)
            assert not readonly.may_not_write(file)
        finally:
            directory.chmod(0o700)
            os.seteuid(os.getuid())
