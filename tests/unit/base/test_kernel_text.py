"""Kernel text that contains names chosen by users."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base import kernel_text


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    """Other characters at which ``str.splitlines`` splits do not end a line, and bytes are preserved."""
    name = b"a\rb\x0bc\x85d\xe2\x80\xa8e\xff"
    (tmp_path / "x").write_bytes(b"Name:\t" + name + b"\nUid:\t5\n")
    rows = kernel_text.lines(tmp_path / "x")
    assert len(rows) == 3
    assert rows[0].encode("utf-8", "surrogateescape") == b"Name:\t" + name
    assert kernel_text.table(rows)["Uid"] == "5"
    assert kernel_text.table(["A: 1", "A: 2", "x", "B: c:d"]) == {"A": "1", "B": "c:d"}


@pytest.mark.parametrize(
    "word",
    [None, "", "-1", "+1", " 1", "1_0", "x", "1.5", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 21, b""],
)
def test_number_in_another_form_is_refused(word: str | bytes | None) -> None:
    """Python accepts more forms than the kernel writes."""
    assert kernel_text.number(word) is None


def test_kernel_numbers_are_parsed() -> None:
    """In every base, in lists, and as sizes."""
    assert (kernel_text.number("17"), kernel_text.number(b"ff", 16), kernel_text.number("0100002", 8)) == (
        17,
        255,
        0o100002,
    )
    assert kernel_text.number("9" * 20) == int("9" * 20)
    assert kernel_text.numbers("1 x 2\t3") == (1, 2, 3)
    assert (kernel_text.kib(" 5 kB"), kernel_text.kib("x kB"), kernel_text.kib(None), kernel_text.kib("")) == (
        5120,
        None,
        None,
        None,
    )
