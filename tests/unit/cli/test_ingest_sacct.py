"""``ingest sacct``: output, stored records, exit statuses."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from click import UsageError
from click.testing import CliRunner, Result
from stored_steps import stored_steps

from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.pipeline import stored_accounting

HEAD = "JobIDRaw|State|Submit|Start|End|AllocTRES|JobName\n"
GOOD = "1|COMPLETED|2026-01-01T10:00:00|2026-01-01T10:00:05|2026-01-01T11:00:05|cpu=1,gres/gpu=2|train\n"
STEP = "1.batch|COMPLETED|2026-01-01T10:00:05|2026-01-01T10:00:05|2026-01-01T11:00:05|cpu=1|batch\n"
BAD = "2|COMPLETED|never|2026-01-01T10:00:05|2026-01-01T11:00:05|cpu=1|x\n"
SINCE, UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory."""
    return tmp_path / "state"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with a good job, its step and a bad record."""
    path = tmp_path / "jobs.txt"
    path.write_text(HEAD + GOOD + STEP + BAD, encoding="utf-8")
    return path


def run(state: Path, *args: str | Path, text: str | bytes | None = None) -> Result:
    """Run ``ingest sacct``."""
    argv = ["ingest", "sacct", "--state", str(state), *map(str, args)]
    return CliRunner().invoke(cli, argv, input=text, standalone_mode=False)


def store(state: Path) -> Repository:
    """Open the database."""
    return Repository.open(f"sqlite:///{state / 'affinode.sqlite'}")


def stored(state: Path) -> pl.DataFrame:
    """Return the stored attempts of jobs."""
    with store(state) as repository:
        return repository.jobs(SINCE, UNTIL)


def test_bad_record_is_reported_and_the_rest_is_stored(state: Path, source: Path) -> None:
    """The report has file, line, job, column and reason; the journal keeps it."""
    result = run(state, "--timezone", "UTC", source)
    assert result.return_value == 0
    assert f"{source}:4: job 2: Submit: 'never' is not a time" in result.stderr
    assert result.stdout.split("\n")[1].split() == [str(source), "3", "1", "1", "2", "0", "0", "1"]
    assert stored(state).select("job_id", "gpus").rows() == [(1, 2)]
    with store(state) as repository:
        (entry,) = repository.ingests(kind="sacct")
    assert (entry.records, entry.new, entry.bad) == (2, 2, 1)
    assert entry.problems[0].line == 4
    assert entry.first == datetime(2026, 1, 1, 10, 0, 5, tzinfo=UTC)


def test_ingesting_the_same_input_twice_is_a_no_op(state: Path, source: Path) -> None:
    """The journal gets no second entry."""
    run(state, "--timezone", "UTC", source)
    before = stored(state)
    result = run(state, "--timezone", "UTC", source)
    assert result.stdout.split("\n")[1].split()[4:] == ["0", "0", "2", "1"]
    assert stored(state).equals(before)
    with store(state) as repository:
        assert len(repository.ingests()) == 1


def test_running_job_is_completed_by_a_later_record(state: Path, recorded: Path) -> None:
    """Two recordings of a real Slurm, minutes apart, in either order."""
    early, later = (recorded / "slurm-24.11" / name for name in ("parsable2.txt", "parsable2-later.txt"))
    for first, second in ((early, later), (later, early)):
        place = state / first.stem
        run(place, "--timezone", "UTC", first)
        run(place, "--timezone", "UTC", second)
        jobs = {(row["job_id"], row["submit"]): row for row in stored(place).iter_rows(named=True)}
        ended = [row for row in jobs.values() if row["job_id"] in (25, 26)]
        assert [row["state"] for row in ended] == ["CANCELLED", "CANCELLED"]
        assert all(row["end"] is not None for row in ended)
        assert len([row for row in jobs.values() if row["job_id"] == 14]) == 2


def test_standard_input_and_json(state: Path) -> None:
    """``-`` reads standard input; the JSON summary has every figure."""
    result = run(state, "-", "--json", "--cluster", "larch", "--timezone", "UTC", text=HEAD + GOOD + STEP + BAD)
    (counts,) = json.loads(result.stdout)["sources"]
    assert (counts["records"], counts["job_runs"], counts["steps"], counts["new"], counts["bad_records"]) == (
        3,
        1,
        1,
        2,
        1,
    )
    assert counts["problems"][0]["line"] == 4
    assert stored(state)["cluster"].to_list() == ["larch"]


def test_strict_stores_nothing(state: Path, source: Path) -> None:
    """The first bad record aborts the ingest."""
    result = run(state, "--strict", "--timezone", "UTC", source)
    assert isinstance(result.exception, InputError)
    assert f"{source}:4" in str(result.exception)
    assert stored(state).is_empty()


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\0", b"JobID|State|User\n1|FAIL", b"hello\n", b"JobID,State\n1|FAILED\n"]
)
def test_invalid_input_does_not_affect_other_files(state: Path, source: Path, tmp_path: Path, data: bytes) -> None:
    """It is one error; the valid file is ingested."""
    wrong = tmp_path / "wrong"
    wrong.write_bytes(data)
    result = run(state, "--timezone", "UTC", wrong, source)
    assert isinstance(result.exception, InputError)
    assert str(wrong) in str(result.exception)
    assert stored(state)["job_id"].to_list() == [1]
    with store(state) as repository:
        assert [entry.source for entry in repository.ingests()] == [str(source)]


def test_each_unreadable_input_is_reported(state: Path, tmp_path: Path) -> None:
    """One line each, and exit status 2."""
    paths = [tmp_path / name for name in ("a", "b")]
    result = run(state, "--timezone", "UTC", *paths)
    assert result.return_value == 2
    assert result.stderr.count("no such file") == 2


def test_dry_run_stores_nothing(state: Path, source: Path) -> None:
    """It does not create the database either."""
    result = run(state, "--dry-run", "--timezone", "UTC", source)
    assert "nothing was stored" in result.stdout
    assert not state.exists()


def test_only_the_first_problems_are_printed(state: Path, source: Path) -> None:
    """The number of the others is printed."""
    source.write_text(HEAD + GOOD + BAD * 5, encoding="utf-8")
    result = run(state, "--problems", "2", "--timezone", "UTC", source)
    assert result.stderr.count("is not a time") == 2
    assert "3 more problems" in result.stderr


def test_ambiguous_times_are_reported(state: Path, source: Path) -> None:
    """The report has the time that was assumed."""
    source.write_text(HEAD + GOOD.replace("2026-01-01T10:00:0", "2025-10-26T02:30:0"), encoding="utf-8")
    result = run(state, "--timezone", "Europe/Oslo", "--problems", "1", source)
    assert "exists twice: taken as 2025-10-26T00:30:00Z" in result.stderr
    assert "1 more times were decided" in result.stderr


def test_jobstats_summaries_are_reported(state: Path) -> None:
    """They are averages, so a report does not use them; the hint names the command that does."""
    head = "JobIDRaw|State|Start|End|AdminComment\n"
    ran = "COMPLETED|2026-01-01T10:00:05|2026-01-01T11:00:05"
    result = run(state, "-", text=f"{head}1|{ran}|JS1:H4sI\n2|{ran}|JS1:Short\n3|{ran}|\n")
    assert "1 run has a jobstats summary in AdminComment" in result.stderr
    assert "slurm-affinode trace jobstats" in result.stderr


def test_delimiter_accepts_escape_sequences(state: Path, source: Path) -> None:
    """For shells without a syntax for control characters."""
    for escape, character in ((r"\x1f", "\x1f"), (r"\t", "\t"), ("|", "|")):
        source.write_text((HEAD + GOOD).replace("|", character), encoding="utf-8")
        assert run(state, "--delimiter", escape, "--timezone", "UTC", source).return_value == 0
    with pytest.raises(UsageError, match="cannot separate"):
        raise run(state, "--delimiter", r"\n", source).exception  # type: ignore[misc]


def test_conflicting_options_are_rejected(state: Path, source: Path) -> None:
    """``--since`` is only for sacct, ``--timezone`` only for files."""
    assert isinstance(run(state, "--since", "1d", source).exception, UsageError)
    assert isinstance(run(state, "--timezone", "UTC").exception, UsageError)


def fake_sacct(directory: Path, answer: str, status: int = 0) -> None:
    """Create a program ``sacct`` that records its arguments and prints ``answer``."""
    directory.mkdir(exist_ok=True)
    (directory / "answer").write_text(answer, encoding="utf-8")
    program = directory / "sacct"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --helpformat ]; then echo "JobIDRaw State Submit Start End AllocTRES JobName"; exit; fi\n'
        f'printf "%s\\n" "$*" >> {directory}/asked\ncat {directory}/answer\n'
        f"[ {status} = 0 ] || echo 'sacct: error: Problem talking to the database: Connection refused' >&2\n"
        f"exit {status}\n",
        encoding="utf-8",
    )
    program.chmod(0o755)


def test_sacct_is_run_if_no_file_is_given(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First for a week, in windows of a day; then from the end of the previous query, less the overlap."""
    fake_sacct(tmp_path / "bin", (HEAD + GOOD + STEP).replace("|", "\x1f"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert run(state, "--until", "2026-01-08T00:00:00Z").return_value == 0
    assert stored(state)["job_id"].to_list() == [1]
    assert run(state, "--until", "2026-01-09T00:00:00Z").return_value == 0
    calls = (tmp_path / "bin" / "asked").read_text(encoding="utf-8").splitlines()
    days = [*range(1, 8), 6, 7, 8]
    assert len(calls) == len(days)
    for day, call in zip(days, calls, strict=True):
        assert f"--starttime=2026-01-{day:02}T00:00:00 --endtime=2026-01-{day + 1:02}T00:00:00" in call
    assert isinstance(run(state, "--since", "2026-01-09", "--until", "2026-01-08").exception, UsageError)


def test_interrupted_query_continues_after_the_last_stored_window(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows before a failure are stored, and are queried again only within the overlap."""
    fake_sacct(tmp_path / "bin", (HEAD + GOOD + STEP).replace("|", "\x1f"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    program, query_log = tmp_path / "bin" / "sacct", tmp_path / "bin" / "asked"
    whole = program.read_text(encoding="utf-8")
    broken = whole.replace("printf", f"[ $(cat {query_log} | wc -l) -lt 5 ] || exit 1\nprintf", 1)
    program.write_text(broken, encoding="utf-8")
    query_log.touch()
    result = run(state, "--until", "2026-01-08T00:00:00Z")
    assert isinstance(result.exception, UnreachableError)
    assert result.stdout.count("sacct 2026-01-") == 5
    program.write_text(whole, encoding="utf-8")
    assert run(state, "--until", "2026-01-08T00:00:00Z").return_value == 0
    assert "--starttime=2026-01-04T00:00:00" in query_log.read_text(encoding="utf-8").splitlines()[5]


def test_unreachable_accounting_database_is_status_3(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored."""
    fake_sacct(tmp_path / "bin", "", status=1)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    result = run(state)
    assert isinstance(result.exception, UnreachableError)
    assert "cannot reach the accounting database" in str(result.exception)
    with store(state) as repository:
        assert repository.ingests() == []


def test_cluster_that_accounts_gpus_is_remembered(state: Path, source: Path) -> None:
    """Jobs of a later file without GPUs have 0 GPUs, not an unknown number."""
    run(state, "--timezone", "UTC", source)
    source.write_text(HEAD + GOOD.replace(",gres/gpu=2", "").replace("1|", "9|", 1), encoding="utf-8")
    run(state, "--timezone", "UTC", source)
    assert dict(stored(state).select("job_id", "gpus").rows()) == {1: 2, 9: 0}


@pytest.mark.parametrize("raw_first", [True, False])
def test_array_task_has_one_id_for_all_field_sets(state: Path, tmp_path: Path, raw_first: bool) -> None:
    """A file without raw IDs and one with them describe the same attempt; it is stored once, under the raw ID."""
    ran = "COMPLETED|2026-01-01T10:00:00|2026-01-01T10:00:05|2026-01-01T11:00:05|gres/gpu=2"
    printed, raw = tmp_path / "printed.txt", tmp_path / "raw.txt"
    head = "JobID|State|Submit|Start|End|AllocTRES"
    printed.write_text(f"{head}\n4_1|{ran}\n4_1.batch|{ran}\n4_2|{ran}\n", encoding="utf-8")
    raw.write_text(f"JobIDRaw|{head}\n21|4_1|{ran}\n21.batch|4_1.batch|{ran}\n", encoding="utf-8")
    for source in (raw, printed) if raw_first else (printed, raw):
        assert run(state, "--timezone", "UTC", source).return_value == 0
    jobs = stored(state)
    assert jobs.sort("array_task_id")["array_task_id"].to_list() == [1, 2]
    assert jobs.filter(pl.col("array_task_id") == 1)["job_id"].to_list() == [21]
    with store(state) as repository:
        assert stored_steps(repository)["job_id"].to_list() == [21]


def test_default_start_of_ingest(state: Path) -> None:
    """A week back at first, else before the last stored attempt or the end of the last sacct call."""
    state.mkdir()
    now, overlap = datetime(2026, 1, 10, tzinfo=UTC), timedelta(days=2)
    with store(state) as repository:
        assert stored_accounting.default_since(repository, now=now, overlap=overlap) == now - timedelta(days=7)
        stored_accounting.reached(repository, now)
        stored_accounting.reached(repository, now - timedelta(days=1))
        assert stored_accounting.default_since(repository, now=now, overlap=overlap) == now - overlap


def test_real_sacct_of_a_gpu_cluster(state: Path, shared_data: Path) -> None:
    """876 records, 294 attempts, 582 steps; ingesting them twice is a no-op."""
    path = shared_data / "jobanalyzer" / "sacct_p.txt"
    assert run(state, path).stdout.split("\n")[1].split()[1:] == ["876", "294", "582", "876", "0", "0", "0"]
    assert run(state, path).stdout.split("\n")[1].split()[1:] == ["876", "294", "582", "0", "0", "876", "0"]
    jobs = stored(state).filter(pl.col("gpus") > 0)
    assert jobs.height == 84
    assert round((jobs["gpus"] * jobs["elapsed_s"]).sum() / 3600, 1) == 39.0
