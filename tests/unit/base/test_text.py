"""Durations, counts and text from elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.text import counted, escaped, figure, one_line, printable, span, visible


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59.4, "59s"), (59.6, "1m"), (90, "1m 30s"), (7500, "2h 5m"), (86400, "1d"), (273600, "3d 4h")],
)
def test_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    """They are whole seconds; negative durations are 0."""
    assert span(seconds) == text


def test_count_has_singular_and_plural() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 1200)] == ["0 GPUs", "1 GPU", "1,200 GPUs"]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"), ("a\x1b[31m", r"a\x1b[31m"), ("a\nb\tc\r", r"a\nb\tc\r"), ("\x7f\x85", r"\x7f\x85"),
        ("a\u202eb", "a[U+202E]b"), ("a\u200bb", "a[U+200B]b"), ("\ufeff", "[U+FEFF]"), ("\u2028", "[U+2028]"),
        ("née 計算", "née 計算"), ("👩\u200d🔬", "👩\u200d🔬"), ("a\u00a0b", "a b"), ("\udc80", "[U+DC80]"),
        ("\ue000", "\ue000"), ("\u0378", "\u0378"),
    ],
)  # fmt: skip
def test_name_escapes_invisible_and_bidirectional_characters(raw: str, shown: str) -> None:
    """Control and zero-width characters, bidirectional overrides and invalid bytes are shown; emoji are kept."""
    assert visible(raw) == shown


@given(st.text())
def test_visible_name_has_no_control_characters(raw: str) -> None:
    """It can always be encoded as UTF-8."""
    shown = visible(raw)
    shown.encode("utf-8")
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u202a\u202b\u202d\u202e\u2066\u2067" for c in shown)


def test_control_characters_in_names_are_replaced() -> None:
    assert printable("a\x1b[31mb\n") == "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}"


def test_control_characters_in_log_lines_are_escaped() -> None:
    assert escaped("a\n<0>b\x1b[2J\udcff\u202e") == r"a\n<0>b\x1b[2J\udcff\u202e"


def test_message_is_one_line_of_limited_length() -> None:
    """White space becomes single spaces; a cut character is left out, and the cut is marked."""
    assert one_line(ValueError(" first\r\n\tsecond\x1b[2J\u2028third ")) == r"first second\x1b[2J third"
    assert one_line("\N{SNOWMAN}" * 10, 30) == "\N{SNOWMAN}" * 10
    assert one_line("\N{SNOWMAN}" * 10, 29) == "\N{SNOWMAN}" * 8 + "..."


@given(st.text())
def test_log_line_terminal_text_and_message_are_printable(raw: str) -> None:
    for text in (escaped(raw), printable(raw), one_line(raw, 20)):
        assert text.isprintable()
    assert len(one_line(raw, 20).encode()) <= 20


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (1234.4, "1,234"), (1e6 + 1, "1,000,001"), (46.28, "46.3"), (0.0424, "0.042"), (-0.0, "0"),
     (1.0, "1"), (1.04, "1.0"), (99.96, "100.0"), (100.4, "100"), (100.6, "101"), (-1.5, "-1.5")],
)  # fmt: skip
def test_figure_has_about_three_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text
