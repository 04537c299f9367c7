"""The compiled conversion of columns agrees with that in Python. ``tests/fuzz/columns.c`` runs it under sanitizers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base import compiled
from slurm_affinode.base.columns import native

SOURCES = Path(native.__file__).parent

pieces = st.sampled_from(
    ["", " ", "-", ".", ":", "T", "Z", "_", "K", "x", "é", "0", "12", "2026", "29", "123456789", "1e5"]
)
texts = st.one_of(
    st.lists(pieces, max_size=9).map("".join),
    st.integers(-5, 10**20).map(str),
    st.from_regex(r"[0-9]{1,16}(\.[0-9]{1,16})?[KMGTP]?", fullmatch=True),
    st.from_regex(
        r"(19|20|24)[0-9]{2}[-/][01][0-9][-/][0-3][0-9][T ][0-2][0-9](:[0-6][0-9]){2}(\.[0-9]{1,4})?Z?", fullmatch=True
    ),
)
columns = st.lists(st.none() | texts, max_size=30).map(lambda cells: pl.Series("cells", cells, pl.String))


def test_structures_are_those_of_the_header() -> None:
    """Names and order of the fields."""
    header = re.sub(r"//.*", "", (SOURCES / "columns.h").read_text())
    for name, kind in {"column": native.TextColumn, "converted": native.Converted}.items():
        body = re.search(rf"struct {name} \{{(.*?)\}};", header, re.S)
        assert body is not None
        assert [field for field, *_ in kind._fields_] == re.findall(r"\b(\w+)(?=[,;])", body[1])


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Let the test load a library of its own."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("content", [None, b"\x7fELF nonsense"], ids=["missing", "damaged"])
def test_missing_or_damaged_library_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libcolumns.so")
    if content is not None:
        native.LIBRARY.write_bytes(content)
    assert native.library() is None
    assert native.decimals(pl.Series(["1"])) is None
    assert native.split(b"1\n", "|", ["a"], 1) is None


@pytest.mark.usefixtures("unloaded")
def test_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure may have changed: the fields of one would be taken for those of another."""
    monkeypatch.setattr(compiled, "digest", lambda directory: "of other sources")
    assert native.library() is None


@given(
    st.lists(st.lists(st.text("ab é\0x0123456789", max_size=20), min_size=3, max_size=3), max_size=8), st.booleans()
)  # fmt: skip
def test_split_agrees_with_python(rows: list[list[str]], open_: bool) -> None:
    text = "".join("|".join(row) + "\n" for row in rows).encode()
    text = text.removesuffix(b"\n") if open_ and rows and rows[-1][-1] else text
    split = native.split(text, "|", ["a", "b", "c"], len(rows))
    assert split is not None
    cells, longest = split
    assert [list(row) for row in cells.iter_rows()] == rows
    assert longest == max((len(cell.encode()) for row in rows for cell in row), default=0)


@given(st.binary(max_size=100) | st.text("|\n ab", max_size=100).map(str.encode), st.integers(1, 4), st.booleans())
def test_split_of_any_text_is_that_of_python_or_refused(text: bytes, width: int, spaces: bool) -> None:
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    cells = [line.split(b"|") for line in lines]
    split = native.split(text, "|", [f"c{at}" for at in range(width)], len(lines), skip_spaces=spaces)
    try:
        text.decode()
        regular = all(len(row) == width for row in cells)
    except UnicodeDecodeError:
        regular = False
    assert (split is not None) == regular
    if split is not None:
        expected = [tuple(cell.decode().lstrip(" ") if spaces else cell.decode() for cell in row) for row in cells]
        assert split[0].rows() == expected


def test_last_line_without_end_is_split() -> None:
    """Also if its last cell is empty, and if the delimiter also ends records."""
    for text in (b"a|b\nc|", b"a|b\nc|\n"):
        split = native.split(text, "|", ["x", "y"], 2)
        assert split is not None
        assert split[0].rows() == [("a", "b"), ("c", "")]
    split = native.split(b"a\nb\0\0c\0d\0", "\0", ["x", "y"], 2, end="\0")
    assert split is not None
    assert split[0].rows() == [("a\nb", ""), ("c", "d")]


def checked(quick: native.Quick | None, cells: pl.Series, expected: list[object]) -> None:
    """Assert that values of simple cells are ``expected``, and that each other cell with a text is odd."""
    assert quick is not None
    odd = set(quick.odd.tolist())
    for at, (cell, value) in enumerate(zip(cells, quick.values, strict=True)):
        if at in odd or not cell:
            assert value is None
            assert cell or at not in odd
        else:
            assert value == expected[at]


def plain(cells: pl.Series, pattern: str, convert: object) -> list[object]:
    return [convert(cell) if cell and re.fullmatch(pattern, cell, re.ASCII) else "odd" for cell in cells]  # type: ignore[operator]


@given(columns, st.sampled_from(["", "K", " MiB"]))
def test_decimals_agree(cells: pl.Series, suffix: str) -> None:
    """The nearest number to the text, to the last bit."""
    cells = pl.concat([cells, cells + suffix])
    checked(
        native.decimals(cells, suffix), cells,
        plain(cells, rf"\d+(\.\d+)?{suffix}", lambda text: float(text.removesuffix(suffix))),
    )  # fmt: skip


def moment_or_none(moment: object) -> object:
    """Return a function that returns "odd" for a date that does not exist."""

    def convert(text: str) -> object:
        try:
            return moment(text)  # type: ignore[operator]
        except ValueError:
            return "odd"

    return convert


@given(columns)
def test_clocks_agree(cells: pl.Series) -> None:
    def moment(text: str) -> datetime:
        clean = text.replace("/", "-").replace(" ", "T").removesuffix("Z")
        return datetime.fromisoformat(clean)

    found = native.clocks(cells)
    assert found is not None
    quick, zones = found
    pattern = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,3})?Z?"
    checked(quick, cells, plain(cells, pattern, moment_or_none(moment)))
    for at, (cell, zone) in enumerate(zip(cells, zones, strict=True)):
        if at not in quick.odd:
            assert zone == (bool(cell) and cell.endswith("Z"))


@pytest.mark.parametrize(
    "cell", ["2024-02-29T00:00:00", "2100-02-28T23:59:59", "1970-01-01T00:00:00", "2499-12-31T12:00:00"]
)
def test_dates_at_the_edges_are_converted(cell: str) -> None:
    found = native.clocks(pl.Series([cell]))
    assert found is not None
    assert found[0].values.to_list() == [datetime.fromisoformat(cell)]


IMPOSSIBLE = (
    "2023-02-29T00:00:00", "2100-02-29T00:00:00", "1969-12-31T23:59:59", "2500-01-01T00:00:00", "2024-13-01T00:00:00",
    "2024-00-01T00:00:00", "2024-04-31T00:00:00", "2024-04-01T24:00:00",
)  # fmt: skip


@pytest.mark.parametrize("cell", IMPOSSIBLE)
def test_impossible_dates_are_odd(cell: str) -> None:
    found = native.clocks(pl.Series([cell]))
    assert found is not None
    assert found[0].odd.tolist() == [0]


def test_slices_of_columns_are_converted() -> None:
    """A slice begins at any bit of its column's validity."""
    cells = pl.Series(["1", None, "3", "x", None, "a text that is longer than a view", "7", "8", None, "10"])
    for begin in range(len(cells)):
        quick = native.decimals(cells[begin:])
        assert quick is not None
        assert quick.values.to_list() == [1, None, 3, None, None, None, 7, 8, None, 10][begin:]
        assert quick.odd.tolist() == [at - begin for at in (3, 5) if at >= begin]
