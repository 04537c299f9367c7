"""sacct text in any form: input that is read, repaired, reported or refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.base.columns import native
from slurm_affinode.base.errors import InputError
from slurm_affinode.slurm.accounting.sacct import SacctReading, read
from slurm_affinode.slurm.accounting.schema import JOBS, STEPS, Accounting

HEAD = "JobIDRaw|JobID|State|Submit|Start|End|ElapsedRaw|AllocTRES|JobName\n"
GPU = "billing=1,cpu=1,gres/gpu=2,mem=1G,node=1"


def row(job: object = 1, *, name: str = "train", state: str = "COMPLETED", tres: str = GPU, printed: str = "") -> str:
    """Return one record that ran for an hour."""
    times = "2026-01-01T10:00:00|2026-01-01T10:00:05|2026-01-01T11:00:05"
    return f"{job}|{printed or job}|{state}|{times}|3600|{tres}|{name}\n"


def parse(text: str | bytes, **how: object) -> Accounting:
    """Read ``text`` as a file named ``in``."""
    data = text.encode() if isinstance(text, str) else text
    return read(data, where="in", reading=SacctReading(**how))  # type: ignore[arg-type]


def packings(data: bytes) -> list[bytes]:
    """Return ``data`` in every supported compression."""
    zstd = pa.Codec("zstd").compress(data, asbytes=True)
    return [gzip.compress(data, mtime=0), bz2.compress(data), lzma.compress(data), zstd]


def utc(text: str) -> datetime:
    """Return an aware time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_plain_record_is_read() -> None:
    """A job and a step, with schema, UTC times and the GPU count."""
    parsed = parse(HEAD + row(7) + row("7.batch", name="batch"))
    assert dict(parsed.jobs.schema) == JOBS
    assert dict(parsed.steps.schema) == STEPS
    job = parsed.jobs.row(0, named=True)
    assert (job["job_id"], job["gpus"], job["elapsed_s"], job["state"]) == (7, 2, 3600, "COMPLETED")
    assert job["start"] == utc("2026-01-01T10:00:05")
    assert job["alloc_mem_bytes"] == 1 << 30
    assert parsed.steps["step_id"].to_list() == ["batch"]
    assert parsed.records == 2
    assert parsed.bad_records == 0


@pytest.mark.parametrize("delimiter", ["|", ",", ";", "\t", "\x1f", "\x01", "||", "<>", " :: ", "XYZ", "§", "_"])
@pytest.mark.parametrize("trailing", [False, True])
def test_delimiter_is_found_from_the_header(delimiter: str, trailing: bool) -> None:
    """It has one or several characters, control characters or letters, with and without one at the end of the line."""
    rows = [["JobID", "State", "Elapsed", "JobName"], ["1", "FAILED", "00:10:00", "a"], ["1.0", "FAILED", "05:00", "b"]]
    end = f"{delimiter}\n" if trailing else "\n"
    parsed = parse("".join(delimiter.join(cells) + end for cells in rows))
    assert parsed.jobs.select("job_id", "state", "elapsed_s", "job_name").rows() == [(1, "FAILED", 600, "a")]
    assert parsed.steps.select("step_id", "elapsed_s").rows() == [("0", 300)]
    assert not parsed.problems


@pytest.mark.parametrize("zone", ["UTC", "Europe/Oslo", "America/New_York"])
@pytest.mark.parametrize("time", ["0001-01-01T00:00:00", "9999-12-31T23:59:59", "0001-01-01T00:00:00+02:00"])
def test_time_out_of_range_is_an_invalid_record(zone: str, time: str) -> None:
    """The year does not exist in another time zone; the other records are read."""
    for reported_time in ("2026-01-01T10:00:05", "2026-01-01T11:00:05"):
        parsed = parse(HEAD + row(7) + row(8).replace(reported_time, time), zone=zone)
        assert parsed.jobs["job_id"].to_list() == [7]
        assert ["is not a time" in problem.reason for problem in parsed.problems] == [True]


def test_non_ascii_digits_are_not_a_job_id() -> None:
    """A name that continues on the next line may have any digits: it is not a job, and no other job is lost."""
    parsed = parse(HEAD + row(7) + row("٣") + row("8_٣") + row(9))
    assert parsed.jobs["job_id"].to_list() == [7, 9]
    assert len(parsed.problems) == 2


@pytest.mark.parametrize("form", ["utf-16", "utf-16-be"])
def test_text_in_utf16_is_read(form: str) -> None:
    """PowerShell's ``>`` writes it; it may be compressed, or be cut in half a character."""
    mark = "" if form == "utf-16" else "\ufeff"
    data = (mark + (HEAD + row(7, name="trainé")).replace("\n", "\r\n")).encode(form)
    for whole in (data, gzip.compress(data)):
        parsed = parse(whole)
        assert (parsed.jobs["job_name"].to_list(), parsed.problems, parsed.notes) == (["trainé"], (), ())
    with pytest.raises(InputError, match="cut"):
        parse(data[:-21])


def test_concatenated_files_may_have_other_columns() -> None:
    """The second header has the same number of columns in another order."""
    parsed = parse("JobIDRaw|State|JobName\n1|FAILED|JobID\nUser|JobID|State\nbob|2|TIMEOUT\n")
    assert parsed.jobs.select("job_id", "state", "user", "job_name").rows() == [
        (1, "FAILED", None, "JobID"), (2, "TIMEOUT", "bob", None)
    ]  # fmt: skip
    assert not parsed.problems


def test_comma_between_two_tres_lists_is_distinguished() -> None:
    """A list names no resource twice, so the second list can begin at one place only."""
    parsed = parse(
        "JobID,JobName,State,ReqTRES,AllocTRES,NodeList\n"
        '1,"a,b",COMPLETED,cpu=1,mem=4G,node=1,billing=1,billing=1,cpu=1,gres/gpu=2,mem=4G,node=1,gpu[01-02],gpu07\n'
    )
    assert parsed.jobs.select("req_tres", "alloc_tres", "node_list", "job_name").row(0) == (
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
def test_comma_after_a_tres_list_begins_the_name(cells: str, tres: int, name: str) -> None:
    """The list continues as long as it is in one of Slurm's orders: a name that looks like a resource adds none."""
    jobs = parse(f"JobID,State,AllocTRES,JobName\n1,COMPLETED,{cells}\n").jobs
    assert jobs["job_name"].to_list() == [name]
    assert len([part for part in (jobs["alloc_tres"][0] or "").split(",") if part]) == tres


def test_name_of_the_canceling_user_ends_at_the_delimiter() -> None:
    """A name that contains the delimiter does not make the columns in between a part of the state."""
    parsed = parse(
        "JobID|State|NodeList|User|JobName\n1|CANCELLED by 1000|n1|ann|a|b\n2|CANCELLED by DOM\\bob|n2|bob|c|d\n"
    )
    assert parsed.jobs.select("cancelled_by", "node_list", "user", "job_name").rows() == [
        ("1000", "n1", "ann", "a|b"), ("DOM\\bob", "n2", "bob", "c|d"),
    ]  # fmt: skip


@pytest.mark.parametrize("header", ["JobName|JobID|State|End", "State|JobName|End|JobID", "State|End|JobID|JobName"])
@pytest.mark.parametrize("name", ["a\nb", "a\n\nb c", "a|b\nc", "x\n|y", "plain", "a||b"])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 30])
def test_names_over_several_lines_may_be_in_any_column(header: str, name: str, chunk_bytes: int) -> None:
    """The column may precede the ID, so that the first line of a record does not have it."""
    columns = header.split("|")

    def line(job: str, name: str) -> str:
        cells = {"JobID": job, "JobName": name, "State": "COMPLETED", "End": "2026-11-01T00:00:00"}
        return "|".join(cells[column] for column in columns)

    lines = [header, line("1", name), line("2", "p"), line("3", name), line("4", name), ""]
    result = read("\n".join(lines).encode(), where="in", reading=SacctReading(chunk_bytes=chunk_bytes))
    assert result.jobs.select("job_id", "job_name").rows() == [(1, name), (2, "p"), (3, name), (4, name)]
    assert result.problems == ()


def test_given_delimiter_is_used() -> None:
    """A delimiter that does not match is refused in one clear line."""
    assert parse("JobID|State\n1|FAILED\n", delimiter="|").jobs.height == 1
    with pytest.raises(InputError, match=r"not separated by ',' but by '\|'"):
        parse("JobID|State\n1|FAILED\n", delimiter=",")


def test_header_names_are_read_regardless_of_case_and_width() -> None:
    """``jobid%20`` is JobID; a repeated column is read once."""
    parsed = parse("jobid%20|STATE|jobname%-30|jobname\n1|TO|x|y\n")
    assert parsed.jobs.select("job_id", "state", "job_name").rows() == [(1, "TIMEOUT", "x")]


def test_single_column_is_a_field_set() -> None:
    """Attempts have a job ID only; without times the submit time is the epoch."""
    parsed = parse("JobID\n1\n1.batch\n\n2\n")
    assert parsed.jobs.select("job_id", "submit", "gpus").rows() == [
        (1, utc("1970-01-01"), None),
        (2, utc("1970-01-01"), None),
    ]


def test_names_may_contain_the_delimiter_in_the_last_column() -> None:
    parsed = parse(HEAD + row(1, name="a|b|c") + row(2))
    assert parsed.jobs["job_name"].to_list() == ["a|b|c", "train"]
    assert "1 record holds the delimiter" in parsed.notes[0]


def test_names_may_contain_newlines() -> None:
    """A line that does not begin a record continues the name before it; empty lines in between are kept."""
    parsed = parse(HEAD + row(1, name="two\nlines\n\nand|more") + row(2))
    assert parsed.jobs["job_name"].to_list() == ["two\nlines\n\nand|more", "train"]
    assert not parsed.problems
    assert parsed.notes[0].endswith("from line 2"), "who doubts that it is a name can look there"


@pytest.mark.parametrize("chunk", [20, 64, 100, 1 << 20])
def test_names_with_newlines_may_cross_chunks(chunk: int) -> None:
    text = HEAD + "".join(row(n, name=f"n{n}\nsecond|{n}") + row(f"{n}.batch", name="batch") for n in range(1, 30))
    parsed = parse(text, chunk_bytes=chunk)
    assert parsed.jobs["job_name"].to_list() == [f"n{n}\nsecond|{n}" for n in range(1, 30)]
    assert parsed.steps.height == 29


def test_name_in_the_middle_is_repaired_if_unambiguous() -> None:
    """Every other column has a known form, so the text that contains the delimiter can be found."""
    head = "JobID|JobName|State|Start|End|NodeList\n"
    line = "5|a|b|c|COMPLETED|2026-01-01T10:00:00|2026-01-01T11:00:00|n[1-2]\n"
    parsed = parse(head + line + "6|x\ny|FAILED|2026-01-01T10:00:00|2026-01-01T11:00:00|n1\n")
    assert parsed.jobs["job_name"].to_list() == ["a|b|c", "x\ny"]
    assert parsed.jobs["node_list"].to_list() == ["n[1-2]", "n1"]


@pytest.mark.parametrize(
    ("name", "cell"), [("ReqMem", "?"), ("ReqMem", "16?"), ("AllocTRES", "cpu=1,license/matlab@flex=2,node=1")]
)
def test_name_is_repaired_beside_rare_forms(name: str, cell: str) -> None:
    """An unknown size, and a license of another server, have a known form, too."""
    parsed = parse(f"{name}|JobID|State|JobName\n{cell}|5|FAILED|a|b\n{cell}|6|FAILED|two\nlines\n")
    assert parsed.jobs["job_name"].to_list() == ["a|b", "two\nlines"]


def test_submit_line_begins_with_a_command() -> None:
    """``a

    b`` is the name, because ``b

    sbatch x`` is not a command line.
    """
    parsed = parse("JobID|State|JobName|SubmitLine\n5|FAILED|a|b|sbatch --wrap 'x|y'\n")
    assert parsed.jobs.select("job_name", "submit_line").row(0) == ("a|b", "sbatch --wrap 'x|y'")


def test_ambiguous_line_is_reported() -> None:
    """The record is not guessed if two interpretations differ."""
    parsed = parse("JobID|User|Account|State\n5|a|b|c|FAILED\n6|u|x|FAILED\n")
    assert parsed.jobs["job_id"].to_list() == [6]
    assert parsed.problems[0].line == 2
    assert "5 of 4 fields" in parsed.problems[0].reason


def test_bytes_that_are_not_utf8_are_escaped() -> None:
    """They are reported, too."""
    parsed = parse((HEAD + row(1, name="caf\u00e9")).encode("latin-1") + row(2, name="naïve").encode())
    assert parsed.jobs["job_name"].to_list() == ["caf\\xe9", "naïve"]
    assert "1 byte is not UTF-8" in parsed.notes[0]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row("abc"), "'abc' is not a job ID"),
        (row(9).replace("2026-01-01T10:00:05", "2026-01-41T10:00:05"), "is not a time"),
        (row(9).replace("T11:00:05", "T09:00:05"), "End is before Start"),
        ("9|9|COMPLETED\n", "3 of 9 fields"),
        (row(9).replace("cpu=1,", "cpu,"), "NAME=AMOUNT"),
    ],
)
def test_invalid_record_is_reported_and_the_rest_is_read(bad: str, reason: str) -> None:
    """Its line, its job if known, and the reason are reported; ``strict`` stops there."""
    text = HEAD + row(1) + bad + row(2)
    parsed = parse(text)
    assert parsed.jobs["job_id"].to_list() == [1, 2]
    assert [problem.line for problem in parsed.problems] == [3]
    assert reason in str(parsed.problems[0])
    assert parsed.records == 3
    assert parsed.bad_records == 1
    with pytest.raises(InputError, match="in:3"):
        parse(text, strict=True)


def test_line_that_is_not_a_record_is_reported() -> None:
    """It cannot continue a name, as steps have names chosen by Slurm."""
    parsed = parse(HEAD + row(1) + row("1.batch", name="batch") + "segmentation fault\n" + row(2))
    assert parsed.problems[0].line == 4
    assert "1 of 9 fields" in parsed.problems[0].reason
    assert parsed.jobs.height == 2


def test_minor_invalid_field_is_unknown() -> None:
    """The GPU-hours of the job still count."""
    text = "JobID|State|Start|End|AllocTRES|MaxRSS\n1|??|2026-01-01T10:00:00|2026-01-01T11:00:00|gres/gpu=1|lots\n"
    parsed = parse(text)
    assert parsed.jobs.select("state", "gpus", "max_rss_bytes").row(0) == (None, 1, None)
    assert parsed.bad_records == 0
    assert {problem.field for problem in parsed.problems} <= {"State", "MaxRSS"}


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
        (b"1|1|COMPLETED\n", "not a header"),
        (b"State|User\nFAILED|a\n", "neither JobID nor JobIDRaw"),
        (b"JobID           JobName  Partition \n------------ ---------- ---------- \n", "default table"),
        (b"JobID|State|User\n1|FAIL", "cut"),
        (b"JobID|State|Start\n1|FAILED|2026-01-01T10:0", "cut"),
        (b"JobID|State|User\n1;FAILED;a\n2;FAILED;a\n", "none of 2 records"),
        *((packed[:-9], "compressed file is damaged or cut") for packed in packings(b"JobID|State\n1|FAILED\n" * 50)),
    ],
)
def test_unusable_input_is_one_clear_line(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse(data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("in")


def test_files_that_cannot_be_opened_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "none")
    with pytest.raises(InputError, match="directory"):
        read(tmp_path)


@pytest.mark.parametrize("end", range(120, 240, 7))
def test_truncated_file_is_refused_or_reported(end: int) -> None:
    """If it is cut within a record, it is refused; if it is cut between records, that is reported."""
    text = (HEAD + row(1) + row("1.batch", name="batch"))[:end]
    try:
        parsed = parse(text)
    except InputError as error:
        assert "cut" in str(error) or "none of" in str(error)  # noqa: PT017 - either way is right
    else:
        assert text.endswith("\n") or any("no newline" in note for note in parsed.notes)


def test_header_alone_is_not_a_job() -> None:
    """sacct prints it if there are no records."""
    assert parse(HEAD).jobs.is_empty()


def test_compression_bom_and_windows_line_endings_are_handled() -> None:
    plain = parse(HEAD + row(1) + row("1.batch", name="batch"))
    text = HEAD + row(1) + row("1.batch", name="batch")
    for data in (
        *packings(text.encode()),
        b"\xef\xbb\xbf" + text.encode(),
        text.replace("\n", "\r\n").encode(),
    ):
        parsed = parse(data)
        assert parsed.jobs.equals(plain.jobs)
        assert parsed.steps.equals(plain.steps)


def test_concatenated_files_are_read() -> None:
    """A header in the middle applies from there on, with the same or another field set and delimiter."""
    text = HEAD + row(1) + HEAD + row(2) + "JobID,State\n3,FAILED\n" + HEAD + row(1, name="later")
    parsed = parse(text)
    assert sorted(parsed.jobs["job_id"].to_list()) == [1, 2, 3]
    assert parsed.jobs.filter(pl.col("job_id") == 1)["job_name"].to_list() == ["later"]
    assert not parsed.problems
    assert parse(text, chunk_bytes=64).jobs.sort("job_id").equals(parsed.jobs.sort("job_id"))


def test_stream_is_read_like_a_file(tmp_path: Path) -> None:
    """Path, bytes and stream give the same result; progress is reported."""
    path = tmp_path / "sacct.txt"
    path.write_text(HEAD + row(1), encoding="utf-8")
    sizes: list[int] = []
    assert read(path, advance=sizes.append).jobs.equals(parse(HEAD + row(1)).jobs)
    with path.open("rb") as stream:
        assert read(stream).jobs.height == 1
    assert read(io.BytesIO(path.read_bytes())).jobs.height == 1
    assert sum(sizes) == 1


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_lines_may_end_in_carriage_returns(end: str) -> None:
    text = (HEAD + row(1) + row(2, name="two")).replace("\n", end)
    for data in (text.encode(), text.encode("utf-16"), gzip.compress(text.encode())):
        parsed = parse(data)
        assert parsed.jobs.select("job_id", "job_name").rows() == [(1, "train"), (2, "two")]
        assert not parsed.problems


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
    """Its number is reported; ``strict`` stops there. Memory use depends on the longest line only."""
    data = gzip.compress((HEAD + row(1) + bad + row(2)).encode())
    result = read(data, where="in", reading=SacctReading(chunk_bytes=chunk_bytes))
    assert result.jobs["job_id"].to_list() == [1, 2]
    assert [(problem.line, problem.dropped) for problem in result.problems] == [(3, True)]
    assert reason in result.problems[0].reason
    if "9|" in bad:
        assert (result.problems[0].job, result.problems[0].field) == ("9", "JobName")
    assert result.records == 3
    with pytest.raises(InputError, match="in:3: "):
        read(data, where="in", reading=SacctReading(strict=True))


def test_field_that_is_too_long_is_reported_and_unknown() -> None:
    """Line, column and sizes are reported; a record with a cluster or ID that is too long is dropped."""
    head = "JobIDRaw|Cluster|User|State|Start|NodeList|WorkDir|JobName\n"
    ran = "COMPLETED|2026-01-01T10:00:00"
    parsed = parse(
        head + f"1|c|u|{ran}|n1|/w|{'x' * 100_000}\n" + f"2|c|{'u' * 1025}|{ran}|n1|/{'w' * 9000}|b\n"
        + f"3|{'c' * 2000}|u|{ran}|n1|/w|c\n" + f"4|c|u|{'S' * 3000}|2026-01-01T10:00:00|n1|/w|{'é' * 512}\n"
    )  # fmt: skip
    assert parsed.jobs.select("job_id", "user", "job_name", "work_dir", "state").rows() == [
        (1, "u", None, "/w", "COMPLETED"), (2, None, "b", None, "COMPLETED"), (4, "u", "é" * 512, "/w", None)
    ]  # fmt: skip
    problems = [(problem.line, problem.field, problem.dropped, problem.reason) for problem in parsed.problems]
    assert [(*fields, reason.partition(",")[0]) for *fields, reason in problems] == [
        (2, "JobName", False, "has 100"), (3, "User", False, "has 1"), (3, "WorkDir", False, "has 9"),
        (4, "Cluster", True, "has 2"), (5, "State", False, "has 3"),
    ]  # fmt: skip
    assert str(parsed.problems[0]) == "job 1: JobName: has 100,000 bytes, at most 1,024 fit, so it is unknown"


WORDS = st.sampled_from(
    [
        "", "1", "7.batch", "7.extern", "8_3", "8_[1-4]", "9+1.0", "x", "COMPLETED", "CANCELLED by 7", "OUT_OF_ME+",
        "00:00:00", "1-02:03:04", "12:30.5", "3600", "1.5K", "4096K", "2026-01-01T10:00:00", "2026-10-25T02:30:00",
        "Unknown", "None", "2026-01-01T10:00:00+0200", "1767261600", "2026-02-30T10:00:00", "cpu=1,gres/gpu=2,mem=1G",
        "cpu=x", "18446744073709551614", "a|b", "a\nb", "\xff", "\u00e9", "gpu[1-3]", "0:15", "-5", "1" * 2000,
        "gres/gpuutil=5,gres/gpumem=7G", "gres/gpuutil:a100=5", "7.4294967291", "JobID", "jobidraw", "1E",
    ]
)  # fmt: skip
COLUMNS = [
    "JobID",
    "State",
    "ExitCode",
    "Submit",
    "Start",
    "End",
    "Elapsed",
    "Suspended",
    "AllocTRES",
    "NNodes",
    "NodeList",
    "ReqMem",
    "TotalCPU",
    "MaxRSS",
    "TRESUsageInMax",
    "ConsumedEnergy",
    "TimelimitRaw",
    "JobName",
]
LINES = st.one_of(
    st.lists(WORDS, min_size=len(COLUMNS), max_size=len(COLUMNS)),
    st.tuples(
        st.sampled_from(["1", "2", "2.batch", "3_4", "3_4.0"]), st.sampled_from(["COMPLETED", "FAILED", "RUNNING"]),
        st.just("0:0"), *[st.sampled_from(["2026-01-01T10:00:00", "2026-01-01T11:00:00", "Unknown"])] * 3,
        st.just("01:00:00"), st.just("00:00:00"), st.sampled_from([GPU, ""]), st.just("1"), st.just("gpu1"),
        st.just("4G"), st.just("01:02.500"), st.sampled_from(["", "1234K"]), st.just(""), st.just("0"), st.just("60"),
        WORDS,
    ).map(list),
)  # fmt: skip


REGULAR = [
    "1", "COMPLETED", "0:0", *["2026-01-01T10:00:00"] * 3, "01:00:00", "00:00:00", GPU, "1", "gpu1", "4G", "01:02.500",
    "", "", "0", "60", "",
]  # fmt: skip


@example(rows=[[""] * len(COLUMNS), REGULAR], zone="UTC", chunk=1 << 20)  # a line without an ID, and one with one
@given(st.lists(LINES, max_size=8), st.sampled_from(["UTC", "Europe/Oslo"]), st.sampled_from([200, 1 << 20]))
def test_result_does_not_depend_on_the_compiled_library(rows: list[list[str]], zone: str, chunk: int) -> None:
    """The same records, problems, decisions and notes, of regular and of damaged lines."""
    text = "\n".join(["|".join(cells) for cells in [COLUMNS, *rows]]) + "\n"
    data = text.encode("latin-1").replace(b"\xe9", "\u00e9".encode())

    def result() -> object:
        try:
            outcome = read(data, where="in", reading=SacctReading(zone=zone, chunk_bytes=chunk))
        except InputError as error:
            return str(error)
        return (
            outcome.jobs.rows(),
            outcome.steps.rows(),
            outcome.problems,
            outcome.decisions,
            outcome.notes,
            outcome.records,
        )

    assert native.library() is not None
    with mock.patch.object(native, "library", return_value=None):
        careful = result()
    assert result() == careful
