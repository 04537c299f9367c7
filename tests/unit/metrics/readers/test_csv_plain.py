"""CSV parsing without ``csv.reader`` gives the same samples and problems."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_affinode.base.columns import native
from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.readers import csv_table
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.lines import blocks
from slurm_affinode.metrics.schema import SAMPLES

UUID = "GPU-5c7e1b3a-0000-4000-8000-000000000000"
HEADERS = ("time,node,uuid,util,fb_used,hpc_job", "time,node,uuid,power.draw")
CELLS = st.sampled_from(
    (
        "", " ", "5", " 5", "5 ", '"5"', ' "5"', '"5" ', '5"', '"', '""', '"a,b"', '"a\nb"', '"""q"""', "N/A", "[N/A]",
        "x", "1e300", "nan", "\t7", "12 %", "é", "\r", "n1", UUID, f'"{UUID}"', "1793520000", "2026-11-01T08:00:00",
        "time",
    )
)  # fmt: skip
SOUND = st.tuples(
    st.integers(1793520000, 1793520100).map(str), st.just("n1"), st.just(UUID), st.sampled_from(("0", "7.5", '"8"')),
    st.sampled_from(("", "1024")), st.sampled_from(("", "11", '"11,12"')),
).map(",".join)  # fmt: skip
LINES = st.one_of(
    SOUND, SOUND, SOUND, st.sampled_from((*HEADERS, "", ",,,,,", "  ")), st.lists(CELLS, max_size=8).map(",".join)
)


def outcome(path: Path, chunk: int, **how: Any) -> tuple[Any, ...]:
    """Return the samples, problems and decisions for a file, or its error."""
    notes = ReadingNotes(path.name)
    options = ReadOptions(aliases=aliases.load(), zone=ZoneInfo("Europe/Berlin"), **how)
    reader = csv_table.CsvReader(notes, options, None, csv_table.Dialect(log=False))
    try:
        rows = pl.concat([pl.DataFrame(schema=SAMPLES), *reader.read(blocks(path, path.name, chunk=chunk))])
    except InputError as error:
        return str(error), error.hint
    return rows.rows(), notes.problems, notes.problem_count, notes.decisions, notes.unknown


@settings(max_examples=100, deadline=None)
@example(header="time,node,uuid,power.draw", lines=['"5"', ',,,"', ',,,"'], mark=",", strict=False)
@given(st.sampled_from(HEADERS), st.lists(LINES, max_size=12), st.sampled_from(",,;\t|"), st.booleans())
def test_split_lines_agree_with_csv_reader(
    tmp_path_factory: pytest.TempPathFactory, header: str, lines: list[str], mark: str, strict: bool
) -> None:
    """Covers quotes, blanks, short and long rows, headers in between, and unterminated lines."""
    path = tmp_path_factory.mktemp("csv") / "s.csv"
    path.write_text(("\n".join([header, *lines])).replace(",", mark), newline="")
    quick = outcome(path, 1 << 20, strict=strict)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_table, "_even_lines", lambda block, delimiter, count: None)
        assert outcome(path, 1 << 20, strict=strict) == quick
        patch.setattr(csv_table, "split_lines", lambda block, delimiter, count: None)
        assert outcome(path, 1 << 20, strict=strict) == quick


TIMES = ("2026-10-25 0{}:30:00", "2026/10/25 0{}:30:00.12", "2026-10-25T0{}:30:00Z", "179352000{}", "2026-02-30 0{}:00")
VALUES = ("{}", "{}.25", "{} %", "{} MiB", "{} GiB", "{}.5 W", "1e{}", "-{}", "[N/A]", "{}x")
FORMS = st.tuples(st.sampled_from(TIMES), st.sampled_from(VALUES), st.sampled_from(VALUES))


@settings(max_examples=60, deadline=None)
@given(FORMS, st.lists(st.tuples(st.none() | FORMS, st.integers(0, 9)), min_size=1, max_size=8))
def test_samples_do_not_depend_on_the_compiled_library(
    tmp_path_factory: pytest.TempPathFactory, usual: tuple[str, str, str], rows: list[tuple[Any, int]]
) -> None:
    """Columns in a single form, and those with other cells among them."""
    path = tmp_path_factory.mktemp("csv") / "s.csv"
    lines = [
        f"{form[0]},n1,{UUID},{form[1]},{form[2]}".format(*[at] * 3) for rest, at in rows if (form := rest or usual)
    ]
    path.write_text("\n".join(["time,node,uuid,util,fb_used", *lines]) + "\n")
    quick = outcome(path, 1 << 20)
    assert native.library() is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        assert outcome(path, 1 << 20) == quick


def test_block_size_does_not_affect_clock_change(tmp_path: Path) -> None:
    """The times and the number of ambiguous times are the same."""
    berlin = ZoneInfo("Europe/Berlin")
    moments = [datetime(2026, 10, 24, 23, tzinfo=UTC) + timedelta(minutes=at) for at in range(240)]
    rows = [f"{moment.astimezone(berlin):%Y-%m-%d %H:%M:%S},n1,{gpu},{gpu}" for moment in moments for gpu in (0, 1)]
    path = tmp_path / "s.csv"
    path.write_text("\n".join(["time,node,index,util", *rows]) + "\n")
    whole, small = outcome(path, 1 << 20), outcome(path, 2000)
    assert whole == small
    assert isinstance(whole[0], list)
    assert [row[list(SAMPLES).index("time")] for row in whole[0]] == [moment for moment in moments for _ in (0, 1)]
    assert list(whole[3].values()) == [240]
