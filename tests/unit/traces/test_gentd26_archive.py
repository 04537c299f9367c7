"""Tables in archives and directories: nothing is ever written, and damage is reported in one line."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces.gentd26 import find_tables

CONTENT = b"a,b\n1,2\n" * 2000


def tar_gz(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def contents(path: Path, **limits: int) -> dict[str, bytes]:
    return {table.name: table.data for table in find_tables([path], lambda name: True, **limits)}


def test_archives_and_plain_and_compressed_files_are_read(tmp_path: Path) -> None:
    """All kinds of files in a directory and its subdirectories are read; other files are ignored."""
    tar_gz(tmp_path / "one.tar.gz", {"deep/one.csv": CONTENT})
    tar_gz(tmp_path / "sub" / "two.tgz", {"two.csv": CONTENT})
    (tmp_path / "three.csv").write_bytes(CONTENT)
    (tmp_path / "four.csv.gz").write_bytes(gzip.compress(CONTENT))
    with zipfile.ZipFile(tmp_path / "five.zip", "w") as archive:
        archive.writestr("x/five.csv", CONTENT)
        archive.writestr("x/readme.txt", "no table")
    with tarfile.open(tmp_path / "six.tar.xz", "w:xz") as archive:
        info = tarfile.TarInfo("six.csv")
        info.size = len(CONTENT)
        archive.addfile(info, io.BytesIO(CONTENT))
    with tarfile.open(tmp_path / "seven.tar", "w") as archive:
        archive.addfile(info, io.BytesIO(CONTENT))
    (tmp_path / "notes.md").write_text("nothing here")
    assert set(contents(tmp_path)) == {"one", "two", "three", "four", "five", "six"}


def test_macos_attribute_files_are_ignored(tmp_path: Path) -> None:
    """``._name`` and ``__MACOSX/`` hold binary attributes of the file with the same name."""
    tar_gz(
        tmp_path / "t.tar.gz", {"._data.csv": b"\x00\x05\x16\x07", "__MACOSX/data.csv": b"\x00", "data.csv": b"a\n1\n"}
    )
    (tmp_path / "._other.csv").write_bytes(b"\x00\x05\x16\x07")
    assert contents(tmp_path) == {"data": b"a\n1\n"}


def test_member_with_hostile_path_is_read_in_memory(tmp_path: Path) -> None:
    """A path that leaves the archive only gives the table its name; nothing is written."""
    inside = tmp_path / "in"
    tar_gz(inside / "t.tar.gz", {"../../escaped.csv": CONTENT, "/abs/absolute.csv": CONTENT})
    assert set(contents(inside)) == {"escaped", "absolute"}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in", "t.tar.gz"]


def test_links_and_devices_in_an_archive_are_skipped(tmp_path: Path) -> None:
    """A link named like a table could point anywhere."""
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("link.csv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        device = tarfile.TarInfo("device.csv")
        device.type = tarfile.CHRTYPE
        archive.addfile(device)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.98])
def test_truncated_archive_is_rejected(tmp_path: Path, keep: float) -> None:
    """The error is one line that names the file, wherever the archive was truncated."""
    path = tar_gz(tmp_path / "t.tar.gz", {"t.csv": bytes(i * 7919 % 251 for i in range(50_000))})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(InputError, match=r"t\.tar\.gz: damaged or cut short") as caught:
        contents(tmp_path)
    assert "\n" not in str(caught.value)


def test_altered_byte_is_detected_by_checksum(tmp_path: Path) -> None:
    """The stream is read to its end, where gzip verifies its checksum."""
    path = tar_gz(tmp_path / "t.tar.gz", {"t.csv": CONTENT})
    data = bytearray(path.read_bytes())
    data[-6] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        contents(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.tar.gz", b"this is text"), ("t.zip", b"this is text"), ("t.csv.gz", b"this is text"),
        ("t.tar.xz", b"this is text"), ("t.tar", b"this is text, and no header of tar" * 20),
        ("t.tar.gz", bz2.compress(b"x")), ("t.tar.xz", lzma.compress(b"x" * 100)[:-8]),
    ],
)  # fmt: skip
def test_content_that_contradicts_the_name_is_rejected(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        contents(tmp_path)


def test_decompressed_size_of_members_and_archives_is_limited(tmp_path: Path) -> None:
    """A small archive with huge contents causes an error instead of exhausting memory."""
    tar_gz(tmp_path / "t.tar.gz", {"t.csv": b"0" * 100_000})
    with pytest.raises(InputError, match=r"t\.csv: larger than 1000 B"):
        contents(tmp_path, member_limit=1000)
    with pytest.raises(InputError, match="unpacks to more than"):
        contents(tmp_path, archive_limit=1000)
    (tmp_path / "t.tar.gz").unlink()
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"0" * 100_000))
    with pytest.raises(InputError, match="larger than"):
        contents(tmp_path, member_limit=1000)
    (tmp_path / "t.csv.gz").unlink()
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a.csv", "b.csv"):
            archive.writestr(name, b"0" * 600)
    with pytest.raises(InputError, match="unpacks to more than"):
        contents(tmp_path, archive_limit=1000)


def test_unreadable_path_is_rejected(tmp_path: Path) -> None:
    """The path does not exist, or the file is not a table."""
    with pytest.raises(InputError, match="no such file"):
        contents(tmp_path / "missing")
    other = tmp_path / "picture.png"
    other.write_bytes(b"x")
    with pytest.raises(InputError, match="neither a CSV file nor an archive"):
        contents(other)


def test_encrypted_zip_member_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("t.csv", CONTENT)
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="encrypted"):
        contents(path)


def test_only_requested_tables_are_decompressed(tmp_path: Path) -> None:
    """Other members are skipped, whatever their size."""
    tar_gz(tmp_path / "t.tar.gz", {"other.csv": b"0" * 5000, "wanted.csv": b"a\n"})
    tables = list(find_tables([tmp_path], lambda name: name == "wanted", member_limit=100))
    assert [table.name for table in tables] == ["wanted"]
    assert tables[0].where.endswith("t.tar.gz: wanted.csv")
