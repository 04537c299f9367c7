"""What a user names goes to Slurm only as a job, a step, a node or text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.errors import InputError
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.faults import BadIdentifierError


@pytest.mark.parametrize(
    "text", ["1", "123", "123_4", "123+1", "123.0", "123_4.batch", "123+1.extern", "123.interactive"]
)
def test_names_of_jobs_and_steps_come_back_as_they_were(text):
    assert str(identifiers.target(text)) == text
    assert identifiers.target(text).job == text.partition(".")[0]


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "-v", "1 2", "1,2", "12;id", "1_", "1_[2-3]", "1_*", "1+", "1.", "1.x", "1.batch.0", "01", "1\n",
     "\u0661", "99999999999", "4294967295", "--me", "all", "1_2+3"],
)  # fmt: skip
def test_everything_else_is_refused_before_slurm_is_asked(text):
    with pytest.raises(BadIdentifierError):
        identifiers.target(text)


@given(st.text(max_size=30))
def test_what_is_accepted_is_digits_and_the_few_separators(text):
    """No accepted name can be an option, hold a space, or name two jobs."""
    try:
        found = str(identifiers.target(text))
    except BadIdentifierError:
        return
    assert found == text
    assert re.fullmatch(r"[0-9][0-9_+.a-z]*", text)


def test_a_step_is_no_job():
    with pytest.raises(BadIdentifierError, match=r"12\.0 is a step"):
        identifiers.job("12.0")
    assert identifiers.job(12).job_id == 12


@pytest.mark.parametrize("name", ["c1", "gpu-01.example.org", "N_7"])
def test_one_node_is_one_name(name):
    assert identifiers.node(name) == name


@pytest.mark.parametrize(
    "name", ["", "-c1", "c[1-2]", "c1,c2", "c 1", "ALL", "all", "c1\n", "c1=x", "é", "c" * 300, "c1."]
)
def test_lists_of_nodes_and_options_are_no_node(name):
    with pytest.raises(BadIdentifierError):
        identifiers.node(name)


@pytest.mark.parametrize(("given_as", "number"), [("USR1", 10), ("SIGUSR1", 10), ("sigterm", 15), (9, 9), ("9", 9)])
def test_signals_by_name_and_number(given_as, number):
    assert identifiers.signal(given_as) == number


@pytest.mark.parametrize("value", [0, -9, "99", "SIG_IGN", "", "USR1 -f", "SIGNALS", "_DFL"])
def test_what_is_no_signal_is_refused(value):
    with pytest.raises(InputError, match="is not a signal"):
        identifiers.signal(value)


def test_text_may_hold_anything_but_nul_and_has_a_length():
    odd = 'a b "c"\n\u2603 --x\tPriority=0 \udcff'
    assert identifiers.text(odd, "comment", 100) == odd
    for value, why in (("a\0b", "NUL"), ("\ud800", "surrogate"), ("\u2603" * 34, "102 bytes")):
        with pytest.raises(InputError, match=why):
            identifiers.text(value, "comment", 100)
