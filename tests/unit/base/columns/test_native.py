"""The compiled conversion of columns agrees with that in Python. ``tests/fuzz/columns.c`` runs it under sanitizers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base import compiled
from slurm_affinode.base.columns import native
from slurm_affinode.base.columns.native import Kind

SOURCES = Path(native.__file__).parent

pieces = st.sampled_from(
    ["", " ", "-", ".", ":", "T", "Z", "_", "K", "x", "é", "0", "12", "2026", "29", "123456789", "1e5"]
)
texts = st.one_of(
    st.lists(pieces, max_size=9).map("".join),
    st.integers(-5, 10**20).map(str),
    st.from_regex(r"[0-9]{1,16}(\.[0-9]{1,16})?[KMGTP]?", fullmatch=True),
    st.from_regex(r"([0-9]{1,3}-)?[0-9]{1,3}(:[0-9]{1,2}){1,2}(\.[0-9]{1,6})?", fullmatch=True),
    st.from_regex(
        r"(19|20|24)[0-9]{2}[-/][01][0-9][-/][0-3][0-9][T ][0-2][0-9](:[0-6][0-9]){2}(\.[0-9]{1,4})?Z?", fullmatch=True
    ),
    st.from_regex(r"[0-9]{1,12}(_[0-9]{1,8})?(\.[A-Za-z0-9]{1,14})?", fullmatch=True),
)
columns = st.lists(st.none() | texts, max_size=30).map(lambda cells: pl.Series("cells", cells, pl.String))


def test_structures_are_those_of_the_header() -> None:
    """Names and order of the fields."""
    header = re.sub(r"//.*", "", (SOURCES / "columns.h").read_text())
    for name, kind in {
        "column": native.TextColumn, "converted": native.Converted, "texts": native.TextViews, "plan": native.Plan,
    }.items():  # fmt: skip
        body = re.search(rf"struct {name} \{{(.*?)\}};", header, re.S)
        assert body is not None
        assert [field for field, *_ in kind._fields_] == re.findall(r"\b(\w+)(?=(?:\[RESULTS\])?[,;])", body[1])


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
    assert native.read(b"1\n", "|", {"a": Kind.INTEGERS}, 1) is None
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
    assert [list(row) for row in split.iter_rows()] == rows


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
        assert split.rows() == expected


def test_last_line_without_end_is_split() -> None:
    """Also if its last cell is empty, and if the delimiter also ends records."""
    for text in (b"a|b\nc|", b"a|b\nc|\n"):
        split = native.split(text, "|", ["x", "y"], 2)
        assert split is not None
        assert split.rows() == [("a", "b"), ("c", "")]
    split = native.split(b"a\nb\0\0c\0d\0", "\0", ["x", "y"], 2, end="\0")
    assert split is not None
    assert split.rows() == [("a\nb", ""), ("c", "d")]


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


def table(cells: pl.Series, kind: Kind, texts_of: str = "") -> native.Column:
    """Return the cells as a column of a table, which has others."""
    text = "".join(f"x|{cell or ''}|\n" for cell in cells).encode()
    kinds = {"before": Kind.TEXTS, "cells": kind, "after": Kind.SKIPPED}
    read = native.read(text, "|", kinds, len(cells), texts_of=texts_of)
    assert read is not None
    result, longest = read
    size = max((len((cell or "").encode()) for cell in cells), default=0)
    assert longest == {"before": min(len(cells), 1), "cells": size, "after": 0}
    assert "after" not in result
    return result["cells"]


def parsed(cells: pl.Series, kind: Kind) -> native.Quick:
    """Return the values of a kind with one result."""
    column = table(cells, kind)
    assert isinstance(column, native.Parsed)
    assert column.cells.to_list() == [cells[at] for at in column.odd.tolist()]
    return native.Quick(column.values[0], column.odd)


@given(columns)
def test_integers_agree(cells: pl.Series) -> None:
    checked(parsed(cells, Kind.INTEGERS), cells, plain(cells, r"\d{1,18}", int))


@given(columns)
def test_sizes_agree(cells: pl.Series) -> None:
    def size(text: str) -> int:
        scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
        return int(text.rstrip("KMGTP")) * scale.get(text[-1], 1)

    checked(parsed(cells, Kind.SIZES), cells, plain(cells, r"\d{1,18}[KMGTP]?", size))


@given(columns)
def test_spans_agree(cells: pl.Series) -> None:
    def seconds(text: str) -> float:
        days, _, clock = text.rpartition("-")
        *larger, last = clock.split(":")
        whole: int = int(days or 0) * 86400 + sum(int(part) * 60**at for at, part in enumerate(reversed(larger), 1))
        return whole + float(last)

    checked(parsed(cells, Kind.SPANS), cells, plain(cells, r"(\d+-\d+:\d+|\d+(:\d+)?):\d+(\.\d+)?", seconds))


@given(columns, st.sampled_from(["", "K", " MiB"]))
def test_decimals_agree(cells: pl.Series, suffix: str) -> None:
    """The nearest number to the text, to the last bit."""
    cells = pl.concat([cells, cells + suffix])
    checked(
        native.decimals(cells, suffix), cells,
        plain(cells, rf"\d+(\.\d+)?{suffix}", lambda text: float(text.removesuffix(suffix))),
    )  # fmt: skip


@given(columns)
def test_clocks_agree(cells: pl.Series) -> None:
    def moment(text: str) -> datetime:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC).replace(tzinfo=None)

    checked(parsed(cells, Kind.CLOCKS), cells, plain(cells, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", moment_or_none(moment)))


def moment_or_none(moment: object) -> object:
    """Return a function that returns "odd" for a date that does not exist."""

    def convert(text: str) -> object:
        try:
            return moment(text)  # type: ignore[operator]
        except ValueError:
            return "odd"

    return convert


@given(columns)
def test_clocks_with_zone_agree(cells: pl.Series) -> None:
    def moment(text: str) -> datetime:
        clean = text.replace("/", "-").replace(" ", "T").removesuffix("Z")
        return datetime.fromisoformat(clean)

    clocks = native.clocks(cells)
    assert clocks is not None
    quick, zones = clocks
    pattern = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,3})?Z?"
    checked(quick, cells, plain(cells, pattern, moment_or_none(moment)))
    for at, (cell, zone) in enumerate(zip(cells, zones, strict=True)):
        if at not in quick.odd:
            assert zone == (bool(cell) and cell.endswith("Z"))


@pytest.mark.parametrize(
    "cell", ["2024-02-29T00:00:00", "2100-02-28T23:59:59", "1970-01-01T00:00:00", "2499-12-31T12:00:00"]
)
def test_dates_at_the_edges_are_converted(cell: str) -> None:
    quick = parsed(pl.Series([cell]), Kind.CLOCKS)
    assert quick.values.to_list() == [datetime.fromisoformat(cell)]


IMPOSSIBLE = (
    "2023-02-29T00:00:00", "2100-02-29T00:00:00", "1969-12-31T23:59:59", "2500-01-01T00:00:00", "2024-13-01T00:00:00",
    "2024-00-01T00:00:00", "2024-04-31T00:00:00", "2024-04-01T24:00:00",
)  # fmt: skip


@pytest.mark.parametrize("cell", IMPOSSIBLE)
def test_impossible_dates_are_odd(cell: str) -> None:
    quick = parsed(pl.Series([cell]), Kind.CLOCKS)
    assert quick.odd.tolist() == [0]


@given(columns)
def test_identifiers_agree(cells: pl.Series) -> None:
    column = table(cells, Kind.IDENTIFIERS, texts_of="cells")
    assert isinstance(column, native.Parsed)
    assert column.texts is not None
    assert column.texts.to_list() == [cell or None for cell in cells]
    pattern = re.compile(r"(\d{1,11})(?:_(\d{1,7}))?(?:\.([A-Za-z0-9]{1,12}))?", re.ASCII)
    for at, (cell, *values) in enumerate(zip(cells, *column.values, strict=True)):
        match = pattern.fullmatch(cell or "")
        if at in column.odd:
            assert values == [None, None, None]
            assert match is None or int(match[2] or 0) >= 1 << 24
        else:
            assert match is not None
            assert values == [int(match[1]), None if match[2] is None else int(match[2]), match[3]]


names = st.sampled_from(
    ["cpu=00:01:00", "fs/disk", "gres/gpumem", "gres/gpuutil", "gres/gpuutil:a100", "xgres/gpuutil", "gres/gpu", "a/b"]
)
amounts = st.sampled_from(["", "=", "=7", "=34908M", "=1.5K", "=x"])
USAGES = st.lists(st.tuples(names, amounts).map("".join), max_size=5).map(",".join)


@given(st.lists(USAGES, max_size=9))
def test_usages_agree(texts: list[str]) -> None:
    """The first amount of each name in the text, as a search for it finds; whatever is ambiguous is odd."""
    column = table(pl.Series("cells", texts, pl.String), Kind.USAGES)
    assert isinstance(column, native.Parsed)
    scale = {"": 1, "M": 1 << 20}
    for at, (text, util, memory) in enumerate(zip(texts, *column.values, strict=True)):
        utils = re.findall(r"gres/gpuutil(?::[^=,]*)?=([^,]+)", text)
        memories = re.findall(r"gres/gpumem(?::[^=,]*)?=([^,]+)", text)
        if at in column.odd:
            assert (util, memory) == (None, None)
            assert "gres/gpu" in text
        else:
            assert util == (int(utils[0]) if utils else None)
            amount = re.fullmatch(r"(\d+)(M?)", memories[0]) if memories else None
            assert memory == (int(amount[1]) * scale[amount[2]] if amount else None)
            assert bool(memories) == bool(amount)
    simple = ["", "cpu=1", "fs/disk=1,gres/gpumem=34908M,gres/gpuutil=92"]
    assert not len(parsed_usage(simple).odd)


def parsed_usage(texts: list[str]) -> native.Parsed:
    column = table(pl.Series("cells", texts, pl.String), Kind.USAGES)
    assert isinstance(column, native.Parsed)
    return column


@given(columns)
def test_texts_are_listed_once_in_the_order_of_their_rows(cells: pl.Series) -> None:
    column = table(cells, Kind.TEXTS)
    assert isinstance(column, native.Encoded)
    expected = [cell or None for cell in cells]
    assert column.distinct.to_list() == list(dict.fromkeys(expected))
    assert column.spread(column.distinct).to_list() == expected


def test_table_is_converted_in_parts() -> None:
    """Rows of later parts follow those before, and a text of an earlier part is the same text."""
    cells = [str(at) if at % 7 else "odd" for at in range(50_000)]
    words = [f"a word that is longer than a view {at % 3000}" for at in range(50_000)]
    text = "".join(f"{cell}|{word}\n" for cell, word in zip(cells, words, strict=True)).encode()
    read = native.read(text, "|", {"cells": Kind.INTEGERS, "words": Kind.TEXTS}, len(cells))
    assert read is not None
    numbers, texts = read[0]["cells"], read[0]["words"]
    assert isinstance(numbers, native.Parsed)
    assert isinstance(texts, native.Encoded)
    assert numbers.values[0].to_list() == [at if at % 7 else None for at in range(50_000)]
    assert numbers.odd.tolist() == list(range(0, 50_000, 7))
    assert numbers.cells.unique().to_list() == ["odd"]
    assert len(texts.distinct) == 3000
    assert texts.spread(texts.distinct).to_list() == words


@pytest.mark.parametrize(
    "text", [b"1\n", b"1|2|3\n", b"1|2\n3\n", b"1|\xff\n", b"1|name\n", b"1|2\n1|2\n"],
    ids=["too few", "too many", "cut", "not UTF-8", "refused", "more lines"],
)  # fmt: skip
def test_table_with_another_line_is_not_read(text: bytes) -> None:
    kinds = {"a": Kind.INTEGERS, "b": Kind.TEXTS}
    assert native.read(b"1|names\n", "|", kinds, 1, refused=["name"]) is not None
    assert native.read(text, "|", kinds, 1, refused=["name"]) is None


def test_slices_of_columns_are_converted() -> None:
    """A slice begins at any bit of its column's validity."""
    cells = pl.Series(["1", None, "3", "x", None, "a text that is longer than a view", "7", "8", None, "10"])
    for begin in range(len(cells)):
        quick = native.decimals(cells[begin:])
        assert quick is not None
        assert quick.values.to_list() == [1, None, 3, None, None, None, 7, 8, None, 10][begin:]
        assert quick.odd.tolist() == [at - begin for at in (3, 5) if at >= begin]
