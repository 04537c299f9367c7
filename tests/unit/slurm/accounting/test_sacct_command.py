"""Running sacct: its arguments, and reported failures. The program is a fake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.slurm.accounting import sacct_command
from slurm_affinode.slurm.interface import BadIdentifierError


class FakeSacct:
    """Replies as sacct does and records its arguments."""

    def __init__(self, help_text: str, *, stdout: bytes = b"JobID\n", stderr: str = "", returncode: int = 0) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.env: Mapping[str, str] = {}
        self._help = help_text
        self._answer = (returncode, stdout, stderr)

    def __call__(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        """Reply."""
        self.calls.append(tuple(argv))
        self.env = env or {}
        if "--helpformat" in argv:
            return Completed(tuple(argv), 0, self._help.encode(), "")
        returncode, stdout, stderr = self._answer
        return Completed(tuple(argv), returncode, stdout, stderr)


SINCE = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
UNTIL = datetime(2026, 1, 2, tzinfo=UTC)


def test_arguments_of_sacct(recorded: Path) -> None:
    """All attempts of all users in UTC, available fields, free text last, a control character as delimiter."""
    fake = FakeSacct((recorded / "slurm-24.11" / "helpformat.txt").read_text(encoding="utf-8"))
    shell = {"SLURM_TIME_FORMAT": "relative", "SACCT_FEDERATION": "1", "SACCT_LOCAL": "1", "PATH": "/x"}
    assert sacct_command.run_sacct(SINCE, UNTIL, run=fake, env=shell) == b"JobID\n"
    arguments = fake.calls[1]
    assert {"--duplicates", "--allusers", "--parsable2", "--delimiter=\x1f"} <= set(arguments)
    assert "--starttime=2026-01-01T10:00:00" in arguments
    assert "--endtime=2026-01-02T00:00:00" in arguments
    fields = (
        next(argument for argument in arguments if argument.startswith("--format="))
        .removeprefix("--format=")
        .split(",")
    )
    assert fields[-2:] == ["JobName", "SubmitLine"]
    assert "AllocTRES" in fields
    assert "AllocGRES" not in fields
    assert fake.env == {"PATH": "/x", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}


def test_clusters_can_be_selected() -> None:
    """One cluster, or all of the database."""
    fake = FakeSacct("JobID JobName AllocGRES")
    sacct_command.run_sacct(SINCE, UNTIL, clusters=("a", "b"), run=fake)
    assert "--clusters=a,b" in fake.calls[-1]
    assert "--format=JobID,AllocGRES,JobName" in fake.calls[-1]
    sacct_command.run_sacct(SINCE, UNTIL, all_clusters=True, run=fake)
    assert "--allclusters" in fake.calls[-1]


def test_long_intervals_are_queried_in_windows_of_a_day() -> None:
    """Without gaps or overlaps; slurmdbd is left alone for as long as its last answer took, at most a minute."""
    now, windows, pauses = [0.0], [], []
    seconds = iter((10.0, 300.0, 5.0))

    def query(since: datetime, until: datetime) -> bytes:
        windows.append((since, until))
        now[0] += next(seconds)
        return b"JobID\n"

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    begin, day = datetime(2026, 1, 1, 12, tzinfo=UTC), timedelta(days=1)
    end = begin + 2.5 * day
    for *_, content in sacct_command.in_windows(begin, end, query, clock=lambda: now[0], sleep=sleep):
        assert content == b"JobID\n"
        now[0] += 4  # for storing it
    assert windows == [(begin, begin + day), (begin + day, begin + 2 * day), (begin + 2 * day, end)]
    assert pauses == [6.0, 56.0]


def test_unreachable_slurmdbd_is_reported(recorded: Path) -> None:
    """The message was recorded while slurmdbd was down."""
    stderr = (recorded / "slurm-24.11" / "stderr-no-slurmdbd.txt").read_text(encoding="utf-8")
    fake = FakeSacct("JobID", stdout=b"JobID\n", stderr=stderr, returncode=1)
    with pytest.raises(UnreachableError, match="cannot reach the accounting database: Problem talking") as caught:
        sacct_command.run_sacct(SINCE, UNTIL, run=fake)
    assert "slurmdbd" in str(caught.value.hint)
    assert caught.value.exit_code == 3


def test_cluster_without_accounting_is_reported() -> None:
    fake = FakeSacct("JobID", stdout=b"", stderr="Slurm accounting storage is disabled\n", returncode=1)
    with pytest.raises(UnreachableError, match="keeps no accounting"):
        sacct_command.run_sacct(SINCE, UNTIL, run=fake)


def test_other_failures_have_the_last_line_of_sacct() -> None:
    fake = FakeSacct("JobID", stdout=b"", stderr="sacct: error: Invalid user id: x\n", returncode=1)
    with pytest.raises(UnreachableError, match="status 1: Invalid user id: x"):
        sacct_command.run_sacct(SINCE, UNTIL, run=fake)


def test_other_program_named_sacct_is_refused() -> None:
    """Its help does not list JobID."""
    with pytest.raises(UnreachableError, match="not Slurm's sacct"):
        sacct_command.sacct_fields(FakeSacct("usage: sacct"))


def test_jobs_of_a_user_on_a_node_are_listed_once() -> None:
    """Requeued jobs have several records; the time is UTC."""
    fake = FakeSacct("", stdout=b"JobIDRaw\n5\n7\n7\n")
    assert sacct_command.jobs_on_node(2001, "c1", 1_700_000_000.9, run=fake, env={}) == {5, 7}
    expected = {"--uid=2001", "--nodelist=c1", "--starttime=2023-11-14T22:13:20", "--duplicates", "--allocations"}
    assert expected <= set(fake.calls[0])
    assert sacct_command.jobs_on_node(2001, "c1", 0, run=FakeSacct("", stdout=b"JobIDRaw\n"), env={}) == set()


def test_unknown_jobs_on_a_node_are_not_none() -> None:
    fake = FakeSacct("", stdout=b"", stderr="sacct: error: slurmdbd: Connection refused", returncode=1)
    with pytest.raises(UnreachableError):
        sacct_command.jobs_on_node(2001, "c1", 0, run=fake, env={})


def test_name_of_a_node_is_no_option() -> None:
    with pytest.raises(BadIdentifierError):
        sacct_command.jobs_on_node(2001, "c1 --allusers", 0, run=FakeSacct(""), env={})


@pytest.mark.parametrize(
    ("stdout", "comment"),
    [
        ("End\x1fAdminComment\n2026-11-02T13:00:00\x1f\n", ""),
        ("End\x1fAdminComment\n2026-11-02T13:00:00\x1fJS1:a|b\nsecond line\n", "JS1:a|b\nsecond line"),
        ("End\x1fAdminComment\nUnknown\x1f\n", None),
        ("End\x1fAdminComment\n", None),
    ],
    ids=["empty", "several-lines", "not-ended", "no-record"],
)
def test_admin_comment_is_known_once_the_end_is_recorded(stdout: str, comment: str | None) -> None:
    fake = FakeSacct("", stdout=stdout.encode())
    assert sacct_command.admin_comment("3_0", run=fake, env={}) == comment
    assert "--jobs=3_0" in fake.calls[0]


class FakeSacctmgr:
    """Replies as sacctmgr does and records its arguments."""

    def __init__(self, stderr: str = "") -> None:
        self.calls: list[tuple[str, ...]] = []
        self._stderr = stderr

    def __call__(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        """Reply."""
        self.calls.append(tuple(argv))
        return Completed(tuple(argv), 1 if self._stderr else 0, b"", self._stderr)


def test_text_is_a_single_argument_after_the_job() -> None:
    fake = FakeSacctmgr()
    sacct_command.set_admin_comment("3_0", "--delete a=b, c", run=fake)
    assert fake.calls == [
        ("sacctmgr", "--immediate", "modify", "job", "where", "jobid=3_0", "set", "AdminComment=--delete a=b, c")
    ]


def test_refusal_has_reason_and_hint() -> None:
    fake = FakeSacctmgr("sacctmgr: error: slurm_persist_conn_open: Connection refused")
    with pytest.raises(UnreachableError, match=r"of job 3 cannot be set: .*Connection refused") as caught:
        sacct_command.set_admin_comment("3", "text", run=fake)
    assert "sacctmgr show cluster" in str(caught.value.hint)


@pytest.mark.parametrize(("job", "text"), [("3 or 1=1", "x"), ("3.0", "x"), ("", "x"), ("3", "a\0b")])
def test_unusable_job_or_text_is_not_passed_on(job: str, text: str) -> None:
    fake = FakeSacctmgr()
    with pytest.raises((BadIdentifierError, InputError)):
        sacct_command.set_admin_comment(job, text, run=fake)
    assert fake.calls == []
