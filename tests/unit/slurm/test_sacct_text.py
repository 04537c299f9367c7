"""sacct text of any shape: what is read, what is repaired, what is reported, what is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from slurm_affinode.errors import InputError
from slurm_affinode.slurm.accounting import Accounting
from slurm_affinode.slurm.sacct import Reading, read
from slurm_affinode.slurm.schema import JOBS, STEPS

HEAD = "JobIDRaw|JobID|State|Submit|Start|End|ElapsedRaw|AllocTRES|JobName\n"
GPU = "billing=1,cpu=1,gres/gpu=2,mem=1G,node=1"


def row(job: object = 1, *, name: str = "train", state: str = "COMPLETED", tres: str = GPU, printed: str = "") -> str:
    """One record that ran for an hour."""
    times = "2026-01-01T10:00:00|2026-01-01T10:00:05|2026-01-01T11:00:05"
    return f"{job}|{printed or job}|{state}|{times}|3600|{tres}|{name}\n"


def parse(text: str | bytes, **how: object) -> Accounting:
    """Read ``text`` as a file called ``in``."""
    data = text.encode() if isinstance(text, str) else text
    return read(data, where="in", how=Reading(**how))  # type: ignore[arg-type]


def packings(data: bytes) -> list[bytes]:
    """``data`` in every compression that is read."""
    zstd = pa.Codec("zstd").compress(data, asbytes=True)
    return [gzip.compress(data, mtime=0), bz2.compress(data), lzma.compress(data), zstd]


def utc(text: str) -> datetime:
    """An aware time."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_a_plain_record() -> None:
    """Job and step, with schema, UTC times and the GPU count."""
    found = parse(HEAD + row(7) + row("7.batch", name="batch"))
    assert dict(found.jobs.schema) == JOBS
    assert dict(found.steps.schema) == STEPS
    job = found.jobs.row(0, named=True)
    assert (job["job_id"], job["gpus"], job["elapsed_s"], job["state"]) == (7, 2, 3600, "COMPLETED")
    assert job["start"] == utc("2026-01-01T10:00:05")
    assert job["alloc_mem_bytes"] == 1 << 30
    assert found.steps["step_id"].to_list() == ["batch"]
    assert found.records == 2
    assert found.bad_records == 0


@pytest.mark.parametrize("delimiter", ["|", ",", ";", "\t", "\x1f", "\x01", "||", "<>", " :: ", "XYZ", "§", "_"])
@pytest.mark.parametrize("trailing", [False, True])
def test_any_delimiter_is_found_from_the_header(delimiter: str, trailing: bool) -> None:
    """One character or several, control characters, letters; with and without one at the end of the line."""
    rows = [["JobID", "State", "Elapsed", "JobName"], ["1", "FAILED", "00:10:00", "a"], ["1.0", "FAILED", "05:00", "b"]]
    end = f"{delimiter}\n" if trailing else "\n"
    found = parse("".join(delimiter.join(cells) + end for cells in rows))
    assert found.jobs.select("job_id", "state", "elapsed_s", "job_name").rows() == [(1, "FAILED", 600, "a")]
    assert found.steps.select("step_id", "elapsed_s").rows() == [("0", 300)]
    assert not found.problems


@pytest.mark.parametrize("zone", ["UTC", "Europe/Oslo", "America/New_York"])
@pytest.mark.parametrize("time", ["0001-01-01T00:00:00", "9999-12-31T23:59:59", "0001-01-01T00:00:00+02:00"])
def test_a_time_beyond_the_calendar_is_a_bad_record(zone: str, time: str) -> None:
    """In another zone there is no such year; the other records are read."""
    for told in ("2026-01-01T10:00:05", "2026-01-01T11:00:05"):
        found = parse(HEAD + row(7) + row(8).replace(told, time), zone=zone)
        assert found.jobs["job_id"].to_list() == [7]
        assert ["is not a time" in one.reason for one in found.problems] == [True]


def test_other_digits_than_those_of_slurm_are_no_job_id() -> None:
    """A name that goes on in the next line may hold any: it is not a job, and none of the others is lost."""
    found = parse(HEAD + row(7) + row("٣") + row("8_٣") + row(9))
    assert found.jobs["job_id"].to_list() == [7, 9]
    assert len(found.problems) == 2


@pytest.mark.parametrize("form", ["utf-16", "utf-16-be"])
def test_text_in_utf16_is_read(form: str) -> None:
    """As PowerShell's ``>`` writes what it gets of a remote sacct; also compressed, and cut in half a character."""
    mark = "" if form == "utf-16" else "\ufeff"
    data = (mark + (HEAD + row(7, name="trainé")).replace("\n", "\r\n")).encode(form)
    for whole in (data, gzip.compress(data)):
        found = parse(whole)
        assert (found.jobs["job_name"].to_list(), found.problems, found.notes) == (["trainé"], (), ())
    with pytest.raises(InputError, match="cut"):
        parse(data[:-21])


def test_files_put_one_after_the_other_may_have_their_ids_in_other_columns() -> None:
    """As many columns, in another order: the second header is still seen."""
    found = parse("JobIDRaw|State|JobName\n1|FAILED|JobID\nUser|JobID|State\nbob|2|TIMEOUT\n")
    assert found.jobs.select("job_id", "state", "user", "job_name").rows() == [
        (1, "FAILED", None, "JobID"), (2, "TIMEOUT", "bob", None)
    ]  # fmt: skip
    assert not found.problems


def test_a_comma_between_two_lists_of_resources_is_told_from_those_within() -> None:
    """No resource is named twice in one list, so there is one place where the second list can begin."""
    found = parse(
        "JobID,JobName,State,ReqTRES,AllocTRES,NodeList\n"
        '1,"a,b",COMPLETED,cpu=1,mem=4G,node=1,billing=1,billing=1,cpu=1,gres/gpu=2,mem=4G,node=1,gpu[01-02],gpu07\n'
    )
    assert found.jobs.select("req_tres", "alloc_tres", "node_list", "job_name").row(0) == (
        "cpu=1,mem=4G,node=1,billing=1",
        "billing=1,cpu=1,gres/gpu=2,mem=4G,node=1",
        "gpu[01-02],gpu07",
        '"a,b"',
    )


@pytest.mark.parametrize(
    ("cells", "tres", "name"),
    [
        ("billing=4,cpu=4,gres/gpu:a100=2,gres/gpu=2,mem=4G,node=1,train", 6, "train"),
        ("cpu=4,mem=4G,node=1,billing=4,gres/gpu=1,a,b", 5, "a,b"),
        ("billing=4,cpu=4,mem=4G,node=1,gres/gpu=9", 4, "gres/gpu=9"),
        (",a=b", 0, "a=b"),
    ],
)
def test_a_comma_after_a_list_of_resources_begins_the_name(cells: str, tres: int, name: str) -> None:
    """The list goes on as long as it is in one of Slurm's orders: a name that looks like a resource adds none."""
    found = parse(f"JobID,State,AllocTRES,JobName\n1,COMPLETED,{cells}\n").jobs
    assert found["job_name"].to_list() == [name]
    assert len([part for part in (found["alloc_tres"][0] or "").split(",") if part]) == tres


def test_who_cancelled_ends_at_the_delimiter() -> None:
    """A name with the delimiter in it does not make the columns between the two a part of the state."""
    found = parse(
        "JobID|State|NodeList|User|JobName\n1|CANCELLED by 1000|n1|ann|a|b\n2|CANCELLED by DOM\\bob|n2|bob|c|d\n"
    )
    assert found.jobs.select("cancelled_by", "node_list", "user", "job_name").rows() == [
        ("1000", "n1", "ann", "a|b"), ("DOM\\bob", "n2", "bob", "c|d"),
    ]  # fmt: skip


@pytest.mark.parametrize("header", ["JobName|JobID|State|End", "State|JobName|End|JobID", "State|End|JobID|JobName"])
@pytest.mark.parametrize("name", ["a\nb", "a\n\nb c", "a|b\nc", "x\n|y", "plain", "a||b"])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 30])
def test_names_over_several_lines_stand_anywhere(header: str, name: str, chunk_bytes: int) -> None:
    """Also before the id, where the line on which a record begins does not have it."""
    columns = header.split("|")

    def line(job: str, name: str) -> str:
        cells = {"JobID": job, "JobName": name, "State": "COMPLETED", "End": "2026-11-01T00:00:00"}
        return "|".join(cells[column] for column in columns)

    lines = [header, line("1", name), line("2", "p"), line("3", name), line("4", name), ""]
    found = read("\n".join(lines).encode(), where="in", how=Reading(chunk_bytes=chunk_bytes))
    assert found.jobs.select("job_id", "job_name").rows() == [(1, name), (2, "p"), (3, name), (4, name)]
    assert found.problems == ()


def test_the_delimiter_can_be_given() -> None:
    """An override that fits is taken; one that does not is one clear line."""
    assert parse("JobID|State\n1|FAILED\n", delimiter="|").jobs.height == 1
    with pytest.raises(InputError, match=r"not separated by ',' but by '\|'"):
        parse("JobID|State\n1|FAILED\n", delimiter=",")


def test_header_names_are_read_whatever_their_case_and_width() -> None:
    """``jobid%20`` is JobID; a column that is there twice is read once."""
    found = parse("jobid%20|STATE|jobname%-30|jobname\n1|TO|x|y\n")
    assert found.jobs.select("job_id", "state", "job_name").rows() == [(1, "TIMEOUT", "x")]


def test_one_column_is_a_field_set_too() -> None:
    """Job ids alone make runs of which nothing else is known; without times the submit time is the epoch."""
    found = parse("JobID\n1\n1.batch\n\n2\n")
    assert found.jobs.select("job_id", "submit", "gpus").rows() == [
        (1, utc("1970-01-01"), None),
        (2, utc("1970-01-01"), None),
    ]


def test_names_with_the_delimiter_in_the_last_column() -> None:
    """Further delimiters belong to the name."""
    found = parse(HEAD + row(1, name="a|b|c") + row(2))
    assert found.jobs["job_name"].to_list() == ["a|b|c", "train"]
    assert "1 record holds the delimiter" in found.notes[0]


def test_names_with_newlines() -> None:
    """A line that begins as no record goes on with the name before it; empty lines between are kept."""
    found = parse(HEAD + row(1, name="two\nlines\n\nand|more") + row(2))
    assert found.jobs["job_name"].to_list() == ["two\nlines\n\nand|more", "train"]
    assert not found.problems
    assert found.notes[0].endswith("from line 2"), "who doubts that it is a name can look there"


@pytest.mark.parametrize("chunk", [20, 64, 100, 1 << 20])
def test_names_with_newlines_across_chunks(chunk: int) -> None:
    """Where a chunk ends makes no difference."""
    text = HEAD + "".join(row(n, name=f"n{n}\nsecond|{n}") + row(f"{n}.batch", name="batch") for n in range(1, 30))
    found = parse(text, chunk_bytes=chunk)
    assert found.jobs["job_name"].to_list() == [f"n{n}\nsecond|{n}" for n in range(1, 30)]
    assert found.steps.height == 29


def test_a_name_in_the_middle_is_repaired_where_one_reading_makes_sense() -> None:
    """Every other column has a form, so the text that holds the delimiter is found."""
    head = "JobID|JobName|State|Start|End|NodeList\n"
    line = "5|a|b|c|COMPLETED|2026-01-01T10:00:00|2026-01-01T11:00:00|n[1-2]\n"
    found = parse(head + line + "6|x\ny|FAILED|2026-01-01T10:00:00|2026-01-01T11:00:00|n1\n")
    assert found.jobs["job_name"].to_list() == ["a|b|c", "x\ny"]
    assert found.jobs["node_list"].to_list() == ["n[1-2]", "n1"]


@pytest.mark.parametrize(
    ("name", "cell"), [("ReqMem", "?"), ("ReqMem", "16?"), ("AllocTRES", "cpu=1,license/matlab@flex=2,node=1")]
)
def test_a_name_is_repaired_beside_rare_forms(name: str, cell: str) -> None:
    """What Slurm prints of a size it does not know, and a licence of another server, have their form too."""
    found = parse(f"{name}|JobID|State|JobName\n{cell}|5|FAILED|a|b\n{cell}|6|FAILED|two\nlines\n")
    assert found.jobs["job_name"].to_list() == ["a|b", "two\nlines"]


def test_of_two_texts_the_submit_line_begins_with_a_command() -> None:
    """``a|b`` is the name, because ``b|sbatch x`` is no command line."""
    found = parse("JobID|State|JobName|SubmitLine\n5|FAILED|a|b|sbatch --wrap 'x|y'\n")
    assert found.jobs.select("job_name", "submit_line").row(0) == ("a|b", "sbatch --wrap 'x|y'")


def test_a_line_with_no_one_reading_is_reported() -> None:
    """Two readings with other figures: neither is guessed."""
    found = parse("JobID|User|Account|State\n5|a|b|c|FAILED\n6|u|x|FAILED\n")
    assert found.jobs["job_id"].to_list() == [6]
    assert found.problems[0].line == 2
    assert "5 of 4 fields" in found.problems[0].reason


def test_bytes_that_are_not_utf8_stay_readable() -> None:
    """They are shown as escapes, and said."""
    found = parse((HEAD + row(1, name="caf\u00e9")).encode("latin-1") + row(2, name="naïve").encode())
    assert found.jobs["job_name"].to_list() == ["caf\\xe9", "naïve"]
    assert "1 byte is not UTF-8" in found.notes[0]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row("abc"), "'abc' is not a job id"),
        (row(9).replace("2026-01-01T10:00:05", "2026-01-41T10:00:05"), "is not a time"),
        (row(9).replace("T11:00:05", "T09:00:05"), "End is before Start"),
        ("9|9|COMPLETED\n", "3 of 9 fields"),
        (row(9).replace("cpu=1,", "cpu,"), "NAME=AMOUNT"),
    ],
)
def test_one_bad_record_is_reported_and_the_rest_is_read(bad: str, reason: str) -> None:
    """With its line, its job where that can be told, and the reason; ``strict`` stops there."""
    text = HEAD + row(1) + bad + row(2)
    found = parse(text)
    assert found.jobs["job_id"].to_list() == [1, 2]
    assert [problem.line for problem in found.problems] == [3]
    assert reason in str(found.problems[0])
    assert found.records == 3
    assert found.bad_records == 1
    with pytest.raises(InputError, match="in:3"):
        parse(text, strict=True)


def test_a_line_that_is_no_record_is_reported() -> None:
    """After a step that Slurm names, nothing can go on."""
    found = parse(HEAD + row(1) + row("1.batch", name="batch") + "segmentation fault\n" + row(2))
    assert found.problems[0].line == 4
    assert "1 of 9 fields" in found.problems[0].reason
    assert found.jobs.height == 2


def test_a_field_that_means_little_is_taken_as_unknown() -> None:
    """The GPU-hours of the job count all the same."""
    text = "JobID|State|Start|End|AllocTRES|MaxRSS\n1|??|2026-01-01T10:00:00|2026-01-01T11:00:00|gres/gpu=1|lots\n"
    found = parse(text)
    assert found.jobs.select("state", "gpus", "max_rss_bytes").row(0) == (None, 1, None)
    assert found.bad_records == 0
    assert {problem.field for problem in found.problems} <= {"State", "MaxRSS"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "the file is empty"),
        (b"PAR1\x00\x00", "Parquet"),
        (b"\x7fELF\x02", "program"),
        (b"JobID|State\n1|\x00|x\n2\x00\n", "binary"),
        (b"JobID|State\n1|\x00|x\n", "the first, line 2: job 1: State: holds a NUL byte in column 3"),
        (b"\xff\xfeJ\x00o\x00", "not sacct output"),
        (b"hello world\n", "not sacct output"),
        (b"a,b,c\n1,2,3\n", "not sacct output"),
        (b"1|1|COMPLETED\n", "no header"),
        (b"State|User\nFAILED|a\n", "neither JobID nor JobIDRaw"),
        (b"JobID           JobName  Partition \n------------ ---------- ---------- \n", "table for people"),
        (b"JobID|State|User\n1|FAIL", "cut"),
        (b"JobID|State|Start\n1|FAILED|2026-01-01T10:0", "cut"),
        (b"JobID|State|User\n1;FAILED;a\n2;FAILED;a\n", "none of 2 records"),
        *((packed[:-9], "compressed file is damaged or cut") for packed in packings(b"JobID|State\n1|FAILED\n" * 50)),
    ],
)
def test_an_input_that_cannot_be_used_is_one_clear_line(data: bytes, message: str) -> None:
    """Nothing of it is read."""
    with pytest.raises(InputError, match=message) as caught:
        parse(data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("in")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    """Missing, and a directory."""
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "none")
    with pytest.raises(InputError, match="directory"):
        read(tmp_path)


@pytest.mark.parametrize("end", range(120, 240, 7))
def test_a_cut_file_is_refused_or_said(end: int) -> None:
    """Cut within a record: refused. Cut where a record may end: said."""
    text = (HEAD + row(1) + row("1.batch", name="batch"))[:end]
    try:
        found = parse(text)
    except InputError as error:
        assert "cut" in str(error) or "none of" in str(error)  # noqa: PT017 - either way is right
    else:
        assert text.endswith("\n") or any("no newline" in note for note in found.notes)


def test_headers_alone_are_no_jobs() -> None:
    """sacct prints that where there was nothing to print."""
    assert parse(HEAD).jobs.is_empty()


def test_compression_bom_and_windows_line_ends() -> None:
    """Wrappings are taken off."""
    plain = parse(HEAD + row(1) + row("1.batch", name="batch"))
    text = HEAD + row(1) + row("1.batch", name="batch")
    for data in (
        *packings(text.encode()),
        b"\xef\xbb\xbf" + text.encode(),
        text.replace("\n", "\r\n").encode(),
    ):
        found = parse(data)
        assert found.jobs.equals(plain.jobs)
        assert found.steps.equals(plain.steps)


def test_files_put_one_after_the_other() -> None:
    """A header in the middle, of the same or another field set and delimiter, takes over."""
    text = HEAD + row(1) + HEAD + row(2) + "JobID,State\n3,FAILED\n" + HEAD + row(1, name="later")
    found = parse(text)
    assert sorted(found.jobs["job_id"].to_list()) == [1, 2, 3]
    assert found.jobs.filter(pl.col("job_id") == 1)["job_name"].to_list() == ["later"]
    assert not found.problems
    assert parse(text, chunk_bytes=64).jobs.sort("job_id").equals(found.jobs.sort("job_id"))


def test_a_stream_is_read_as_a_file_is(tmp_path: Path) -> None:
    """Path, bytes and stream give the same; progress is told."""
    path = tmp_path / "sacct.txt"
    path.write_text(HEAD + row(1), encoding="utf-8")
    told: list[int] = []
    assert read(path, advance=told.append).jobs.equals(parse(HEAD + row(1)).jobs)
    with path.open("rb") as stream:
        assert read(stream).jobs.height == 1
    assert read(io.BytesIO(path.read_bytes())).jobs.height == 1
    assert sum(told) == 1


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_lines_may_end_in_carriage_returns(end: str) -> None:
    """Alone, too."""
    text = (HEAD + row(1) + row(2, name="two")).replace("\n", end)
    for data in (text.encode(), text.encode("utf-16"), gzip.compress(text.encode())):
        found = parse(data)
        assert found.jobs.select("job_id", "job_name").rows() == [(1, "train"), (2, "two")]
        assert not found.problems


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(9, name="a\0b"), "holds a NUL byte in column"),
        (row(9, name="x" * (5 << 20)), "is longer than 4,096 KiB"),
        ("\0" * 4096 + "\n", "holds a NUL byte in column 1"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1 << 12, 1 << 24])
def test_damaged_line_is_reported_and_rest_is_read(bad: str, reason: str, chunk_bytes: int) -> None:
    """With its number; ``strict`` stops there. Memory is that of the longest line, not of what a file unpacks to."""
    data = gzip.compress((HEAD + row(1) + bad + row(2)).encode())
    found = read(data, where="in", how=Reading(chunk_bytes=chunk_bytes))
    assert found.jobs["job_id"].to_list() == [1, 2]
    assert [(one.line, one.dropped) for one in found.problems] == [(3, True)]
    assert reason in found.problems[0].reason
    if "9|" in bad:
        assert (found.problems[0].job, found.problems[0].field) == ("9", "JobName")
    assert found.records == 3
    with pytest.raises(InputError, match="in:3: "):
        read(data, where="in", how=Reading(strict=True))


def test_field_that_is_too_long_is_reported_and_unknown() -> None:
    """Line, column and sizes are said; a cluster or an id that is too long cannot be left open."""
    head = "JobIDRaw|Cluster|User|State|Start|NodeList|WorkDir|JobName\n"
    ran = "COMPLETED|2026-01-01T10:00:00"
    found = parse(
        head + f"1|c|u|{ran}|n1|/w|{'x' * 100_000}\n" + f"2|c|{'u' * 1025}|{ran}|n1|/{'w' * 9000}|b\n"
        + f"3|{'c' * 2000}|u|{ran}|n1|/w|c\n" + f"4|c|u|{'S' * 3000}|2026-01-01T10:00:00|n1|/w|{'é' * 512}\n"
    )  # fmt: skip
    assert found.jobs.select("job_id", "user", "job_name", "work_dir", "state").rows() == [
        (1, "u", None, "/w", "COMPLETED"), (2, None, "b", None, "COMPLETED"), (4, "u", "é" * 512, "/w", None)
    ]  # fmt: skip
    assert [(one.line, one.field, one.dropped, one.reason.partition(",")[0]) for one in found.problems] == [
        (2, "JobName", False, "has 100"), (3, "User", False, "has 1"), (3, "WorkDir", False, "has 9"),
        (4, "Cluster", True, "has 2"), (5, "State", False, "has 3"),
    ]  # fmt: skip
    assert str(found.problems[0]) == "job 1: JobName: has 100,000 bytes, at most 1,024 fit, so it is unknown"
