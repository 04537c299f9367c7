"""Running sacct: what is asked, and what a failure says. The program is a stand-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurm_affinode.errors import UnreachableError
from slurm_affinode.process import Completed
from slurm_affinode.slurm import commands


class FakeSacct:
    """Answers as sacct does and remembers what it was asked."""

    def __init__(self, help_text: str, *, stdout: bytes = b"JobID\n", stderr: str = "", returncode: int = 0) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.env: Mapping[str, str] = {}
        self._help = help_text
        self._answer = (returncode, stdout, stderr)

    def __call__(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        """Answer."""
        self.calls.append(tuple(argv))
        self.env = env or {}
        if "--helpformat" in argv:
            return Completed(tuple(argv), 0, self._help.encode(), "")
        returncode, stdout, stderr = self._answer
        return Completed(tuple(argv), returncode, stdout, stderr)


SINCE = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
UNTIL = datetime(2026, 1, 2, tzinfo=UTC)


def test_what_is_asked(recorded: Path) -> None:
    """Every run of every user in UTC, fields that this release has, free text last, a control character between."""
    fake = FakeSacct((recorded / "slurm-24.11" / "helpformat.txt").read_text(encoding="utf-8"))
    shell = {"SLURM_TIME_FORMAT": "relative", "SACCT_FEDERATION": "1", "SACCT_LOCAL": "1", "PATH": "/x"}
    assert commands.run_sacct(SINCE, UNTIL, run=fake, env=shell) == b"JobID\n"
    arguments = fake.calls[1]
    assert {"--duplicates", "--allusers", "--parsable2", "--delimiter=\x1f"} <= set(arguments)
    assert "--starttime=2026-01-01T10:00:00" in arguments
    assert "--endtime=2026-01-02T00:00:00" in arguments
    fields = next(one for one in arguments if one.startswith("--format=")).removeprefix("--format=").split(",")
    assert fields[-2:] == ["JobName", "SubmitLine"]
    assert "AllocTRES" in fields
    assert "AllocGRES" not in fields
    assert fake.env == {"PATH": "/x", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}


def test_clusters_can_be_chosen() -> None:
    """One, or all of the database."""
    fake = FakeSacct("JobID JobName AllocGRES")
    commands.run_sacct(SINCE, UNTIL, clusters=("a", "b"), run=fake)
    assert "--clusters=a,b" in fake.calls[-1]
    assert "--format=JobID,AllocGRES,JobName" in fake.calls[-1]
    commands.run_sacct(SINCE, UNTIL, all_clusters=True, run=fake)
    assert "--allclusters" in fake.calls[-1]


def test_a_database_that_does_not_answer(recorded: Path) -> None:
    """Recorded while slurmdbd was down."""
    stderr = (recorded / "slurm-24.11" / "stderr-no-slurmdbd.txt").read_text(encoding="utf-8")
    fake = FakeSacct("JobID", stdout=b"JobID\n", stderr=stderr, returncode=1)
    with pytest.raises(UnreachableError, match="cannot reach the accounting database: Problem talking") as caught:
        commands.run_sacct(SINCE, UNTIL, run=fake)
    assert "slurmdbd" in str(caught.value.hint)
    assert caught.value.exit_code == 3


def test_a_cluster_without_accounting() -> None:
    """There is nothing to read, and what to do is said."""
    fake = FakeSacct("JobID", stdout=b"", stderr="Slurm accounting storage is disabled\n", returncode=1)
    with pytest.raises(UnreachableError, match="keeps no accounting"):
        commands.run_sacct(SINCE, UNTIL, run=fake)


def test_other_failures_carry_the_last_line() -> None:
    """As sacct said it."""
    fake = FakeSacct("JobID", stdout=b"", stderr="sacct: error: Invalid user id: x\n", returncode=1)
    with pytest.raises(UnreachableError, match="status 1: Invalid user id: x"):
        commands.run_sacct(SINCE, UNTIL, run=fake)


def test_another_program_called_sacct() -> None:
    """Its help names no JobID."""
    with pytest.raises(UnreachableError, match="not Slurm's sacct"):
        commands.sacct_fields(FakeSacct("usage: sacct"))
