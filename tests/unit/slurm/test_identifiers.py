"""Identifiers from users reach Slurm only as a job, a step, a node or text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.errors import InputError
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.interface import BadIdentifierError


@pytest.mark.parametrize(
    "text", ["1", "123", "123_4", "123+1", "123.0", "123_4.batch", "123+1.extern", "123.interactive"]
)
def test_job_and_step_names_are_unchanged(text):
    assert str(identifiers.target(text)) == text
    assert identifiers.target(text).job == text.partition(".")[0]


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "-v", "1 2", "1,2", "12;id", "1_", "1_[2-3]", "1_*", "1+", "1.", "1.x", "1.batch.0", "01", "1\n",
     "\u0661", "99999999999", "4294967295", "--me", "all", "1_2+3"],
)  # fmt: skip
def test_other_identifiers_are_refused_before_a_request(text):
    with pytest.raises(BadIdentifierError):
        identifiers.target(text)


@given(st.text(max_size=30))
def test_accepted_identifiers_have_digits_and_separators_only(text):
    """An accepted name can be neither an option nor several jobs, and has no space."""
    try:
        result = str(identifiers.target(text))
    except BadIdentifierError:
        return
    assert result == text
    assert re.fullmatch(r"[0-9][0-9_+.a-z]*", text)


def test_step_is_not_a_job():
    with pytest.raises(BadIdentifierError, match=r"12\.0 is a step"):
        identifiers.job("12.0")
    assert identifiers.job(12).job_id == 12


@pytest.mark.parametrize("name", ["c1", "gpu-01.example.org", "N_7"])
def test_node_name_is_accepted(name):
    assert identifiers.node(name) == name


@pytest.mark.parametrize(
    "name", ["", "-c1", "c[1-2]", "c1,c2", "c 1", "ALL", "all", "c1\n", "c1=x", "é", "c" * 300, "c1."]
)
def test_node_lists_and_options_are_refused(name):
    with pytest.raises(BadIdentifierError):
        identifiers.node(name)


@pytest.mark.parametrize(("given_as", "number"), [("USR1", 10), ("SIGUSR1", 10), ("sigterm", 15), (9, 9), ("9", 9)])
def test_signals_are_accepted_by_name_and_number(given_as, number):
    assert identifiers.signal(given_as) == number


@pytest.mark.parametrize("value", [0, -9, "99", "SIG_IGN", "", "USR1 -f", "SIGNALS", "_DFL"])
def test_invalid_signal_is_refused(value):
    with pytest.raises(InputError, match="is not a signal"):
        identifiers.signal(value)


def test_text_is_limited_in_length_and_has_no_nul():
    odd = 'a b "c"\n\u2603 --x\tPriority=0 \udcff'
    assert identifiers.text(odd, "comment", 100) == odd
    for value, why in (("a\0b", "NUL"), ("\ud800", "surrogate"), ("\u2603" * 34, "102 bytes")):
        with pytest.raises(InputError, match=why):
            identifiers.text(value, "comment", 100)
