"""Text of the kernel in which a user has chosen a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode import kerneltext


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    """What ``str.splitlines`` would split stays together, and bytes stay what they are."""
    name = b"a\rb\x0bc\x85d\xe2\x80\xa8e\xff"
    (tmp_path / "x").write_bytes(b"Name:\t" + name + b"\nUid:\t5\n")
    rows = kerneltext.lines(tmp_path / "x")
    assert len(rows) == 3
    assert rows[0].encode("utf-8", "surrogateescape") == b"Name:\t" + name
    assert kerneltext.table(rows)["Uid"] == "5"
    assert kerneltext.table(["A: 1", "A: 2", "x"]) == {"A": "1"}


@pytest.mark.parametrize(
    "word",
    [None, "", "-1", "+1", " 1", "1_0", "x", "1.5", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 21, b""],
)
def test_what_the_kernel_does_not_write_is_no_number(word: str | bytes | None) -> None:
    """Python takes more for one."""
    assert kerneltext.number(word) is None


def test_numbers_of_the_kernel_are_read() -> None:
    """Of every base, in lines, and as sizes."""
    assert (kerneltext.number("17"), kerneltext.number(b"ff", 16), kerneltext.number("0100002", 8)) == (
        17,
        255,
        0o100002,
    )
    assert kerneltext.numbers("1 x 2\t3") == (1, 2, 3)
    assert (kerneltext.kib(" 5 kB"), kerneltext.kib("x kB"), kerneltext.kib(None), kerneltext.kib("")) == (
        5120,
        None,
        None,
        None,
    )
