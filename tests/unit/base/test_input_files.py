"""Input files: line ends, encodings, damaged and endless lines."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base import input_files
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import count_byte, is_binary, unpacked, utf8_stream, whole_lines

LONGEST = 8
_bytes = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\0", b"x" * 9, b"y" * 40, b"\xff"])).map(b"".join)


def read(data: bytes, chunk: int) -> tuple[list[bytes], list[int]]:
    """Return the pieces, and the numbers of rejected lines."""
    rejected: list[int] = []
    pieces = whole_lines(
        io.BytesIO(data).read, chunk, where="in", longest=LONGEST, reject=lambda line, why, data: rejected.append(line)
    )
    return list(pieces), rejected


@given(_bytes.filter(lambda data: b"\r" not in data), st.integers(1, 60))
def test_lines_do_not_depend_on_the_chunk_size(data: bytes, chunk: int) -> None:
    """Damaged and long lines are empty and reported by number; every piece but the last ends with a newline."""
    lines = data.split(b"\n")
    bad = [number for number, line in enumerate(lines, 1) if b"\0" in line or len(line) > LONGEST]
    pieces, rejected = read(data, chunk)
    assert rejected == bad
    expected = b"\n".join(b"" if number in bad else line for number, line in enumerate(lines, 1))
    assert b"".join(pieces) == expected
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


@pytest.mark.parametrize("chunk", range(1, 30))
@pytest.mark.parametrize("end", [b"", b"\n", b"\na"])
def test_longest_permitted_line_is_read(end: bytes, chunk: int) -> None:
    """One byte more is too many; no line disappears without being reported, wherever a chunk ends."""
    at_most = b"b\n" + b"x" * LONGEST + end
    pieces, rejected = read(at_most, chunk)
    assert (b"".join(pieces), rejected) == (at_most, [])
    pieces, rejected = read(b"b\n" + b"x" * (LONGEST + 1) + end, chunk)
    assert (b"".join(pieces), rejected) == (b"b\n" + end, [2])


@given(st.lists(st.sampled_from([b"", b"a", b"bc"]), min_size=2), st.integers(40, 60))
def test_lines_may_end_in_carriage_returns(lines: list[bytes], chunk: int) -> None:
    """The first line of the file does."""
    pieces, rejected = read(b"head\r" + b"\r".join(lines) + b"\r.", chunk)
    assert (b"".join(pieces), rejected) == (b"head\n" + b"\n".join(lines) + b"\n.", [])


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40), st.sampled_from(["utf-16", "utf-8"]))
def test_utf16_is_converted_to_utf8(text: str, encoding: str) -> None:
    """The byte order mark identifies it."""
    data = text.encode(encoding)
    assert utf8_stream(io.BufferedReader(io.BytesIO(data))).read() == text.encode()


def test_rejected_lines_have_a_reason() -> None:
    reasons: list[tuple[int, str]] = []
    data = b"ok\nab\0c\0\n" + b"x" * 3073 + b"\n" + b"x" * 3072 + b"\n\0"
    pieces = whole_lines(
        io.BytesIO(data).read, 100, where="in", longest=3072,
        reject=lambda line, why, _: reasons.append((line, why)),
    )  # fmt: skip
    assert b"".join(pieces) == b"ok\n\n\n" + b"x" * 3072 + b"\n"
    assert reasons == [
        (2, "holds a NUL byte in column 3: the file may be damaged"),
        (3, "is longer than 3 KiB"),
        (5, "holds a NUL byte in column 1: the file may be damaged"),
    ]


def test_thousand_nul_bytes_are_reported_one_by_one() -> None:
    assert read(b"\0\n" * 1000, 100)[1] == list(range(1, 1001))


def test_thousands_of_nul_bytes_are_a_binary_file() -> None:
    """Memory for reported lines is bounded."""
    with pytest.raises(InputError, match="in:1001: is a binary file"):
        read(b"\0\n" * 5000, 100)


@pytest.mark.parametrize(
    ("head", "binary"),
    [
        (b"a\nb\0\nc\n", False),
        (b"\0", True),
        (b"\x89PNG\r\n\x1a\n\0\0", True),
        (b"a\n\0\n\0\n", True),
        (b"a", False),
        (b"a\n\0\n", False),
        (b"a b\n\0 c\n", False),
    ],
)
def test_binary_files_are_distinguished_from_damaged_text(head: bytes, binary: bool) -> None:
    """Most of their lines decide."""
    assert is_binary(head) == binary


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_small_file_that_unpacks_to_a_huge_one_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of some kilobytes would keep a command busy for hours. Text that compresses as usual is read."""
    pack = {
        "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress,
        "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
    }[kind]  # fmt: skip
    monkeypatch.setattr(input_files, "DOCUMENT_BYTES", 1 << 16)
    monkeypatch.setattr("slurm_affinode.base.limits.DOCUMENT_BYTES", 1 << 16)
    text = b"".join(b"%d %x\n" % (number, number * 40503 % 65537) for number in range(1 << 15))
    assert unpacked(io.BytesIO(pack(text)), kind, where="in").read() == text
    with pytest.raises(InputError, match="in: unpacks to more than"):
        unpacked(io.BytesIO(pack(b"0" * (32 << 20))), kind, where="in").read()


@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 1 << 16, (1 << 17) + 3])
def test_count_byte_counts_like_bytes_count(size: int) -> None:
    """Also across the blocks in which it counts."""
    data = (b"a|bc\n|" * (size // 6 + 1))[:size]
    assert count_byte(data, b"|") == data.count(b"|")
