"""Running programs: every failure is one line that a person can act on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_affinode.errors import UnreachableError
from slurm_affinode.process import run


def test_output_and_environment() -> None:
    """Standard output comes as bytes, with exactly the environment that was given."""
    done = run([sys.executable, "-c", "import os; print(sorted(os.environ)[0])"], timeout_s=30, env={"A": "1"})
    assert done.stdout == b"A\n"
    assert done.returncode == 0


def test_stdin_is_closed_unless_given() -> None:
    """A program that reads standard input sees its end, not the terminal."""
    script = "import sys; print(len(sys.stdin.read()))"
    assert run([sys.executable, "-c", script], timeout_s=30).stdout == b"0\n"
    assert run([sys.executable, "-c", script], timeout_s=30, stdin=b"abc").stdout == b"3\n"


def test_the_last_line_of_standard_error_is_the_reason() -> None:
    """A failing program's own words are passed on."""
    script = "import sys; print('first', file=sys.stderr); print('no such cluster', file=sys.stderr); sys.exit(4)"
    with pytest.raises(UnreachableError, match="ended with status 4: no such cluster"):
        run([sys.executable, "-c", script], timeout_s=30)
    assert run([sys.executable, "-c", script], timeout_s=30, check=False).returncode == 4


def test_missing_forbidden_and_slow_programs(tmp_path: Path) -> None:
    """Each says what is the matter."""
    with pytest.raises(UnreachableError, match="no-such-program-here: no such program"):
        run(["no-such-program-here"], timeout_s=1)
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(UnreachableError, match="not allowed"):
        run([str(plain)], timeout_s=1)
    with pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"):
        run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)
