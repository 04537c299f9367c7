"""The policy file: accepted contents, and mistakes reported by line."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.errors import InputError
from slurm_affinode.core.cleanup_policy import (
    ACTION_DIAGNOSES,
    ACTION_KINDS,
    parse_policy,
    read_policy,
    working_now,
)
from slurm_affinode.model.cleanup import NEVER, Policy
from slurm_affinode.model.finding import KINDS
from slurm_affinode.slurm.hostlist import expand

BUILT_IN = Path(__file__).resolve().parents[3] / "reports" / "zombies-policy.toml"

WHOLE = """
[limits]
cancel = 3
[calendar]
timezone = "Europe/Berlin"
working_days = ["mon", "Tuesday"]
hours = "08:30-24:00"
holidays = [2026-11-16, "12-25"]
[default]
action = "warn"
[[rule]]
name = "nights"
partitions = "gpu"
nodes = ["c[01-03]", "gpu*"]
kinds = ["squatter"]
action = "cancel"
sliding = { first_warning = "30m", cancel = 3600 }
interactive.max_run = "2h"
[[exempt]]
users = ["carol"]
until = 2027-01-31
reason = "thesis"
[[exempt]]
accounts = ["ops*"]
until = "never"
reason = "monitoring"
[mail]
via = "smtp"
address = "{user}@example.org"
smtp = { host = "mail.example.org", port = 465, tls = "tls" }
"""


def faults(text: str) -> list[tuple[int, str]]:
    return [(problem.line, problem.message) for problem in read_policy(text, where="z.toml")[1]]


def test_complete_policy_is_parsed() -> None:
    policy = parse_policy(WHOLE, where="z.toml", expand=expand)
    [rule] = policy.rules
    assert rule.match.nodes == ("c01", "c02", "c03", "gpu*")
    assert rule.sets == {"action", "sliding", "interactive"}
    assert (rule.settings.sliding.first_warning_s, rule.settings.sliding.cancel_s) == (1800.0, 3600.0)
    assert rule.settings.interactive.max_run_s == 7200.0
    assert rule.line == 11
    assert policy.calendar.begin == time(8, 30)
    assert policy.calendar.working_days == {0, 1}
    assert policy.exemptions[0].until == date(2027, 1, 31)
    assert policy.exemptions[1].until == NEVER
    assert policy.mail.smtp.port == 465
    assert policy.limits.cancel == 3


def test_built_in_policy_is_valid() -> None:
    """Its limits and periods are the defaults."""
    policy = parse_policy(BUILT_IN.read_text(), where="built-in policy", expand=expand)
    assert {rule.settings.action for rule in policy.rules} == {"cancel", "kill", "warn"}
    assert policy.limits == Policy().limits
    assert policy.keep == Policy().keep
    assert policy.epilog == Policy().epilog


def test_empty_policy_has_the_defaults() -> None:
    policy = parse_policy("", where="z.toml")
    assert policy == Policy(where="z.toml")
    assert (policy.min_dimensions, policy.max_evidence_age_s) == (2, Policy().max_evidence_age_s)
    assert parse_policy("[mail]\n[keep]\n[epilog]\n[calendar]\n[default]\n[limits]", where="z.toml") == policy


def test_rule_without_a_name_is_named_by_its_number() -> None:
    policy = parse_policy("[[rule]]\nusers = 'a'\n[[rule]]\nname = 'b'\n[[rule]]\nusers = 'c'\n", where="z.toml")
    assert [rule.name for rule in policy.rules] == ["rule 1", "b", "rule 3"]


def test_exemption_is_from_warnings_only_if_requested() -> None:
    text = "[[exempt]]\nusers = ['a']\nuntil = 'never'\nreason = 'x'\n"
    policy = parse_policy(text + text + "warnings = true\n", where="z.toml")
    assert [exemption.warnings for exemption in policy.exemptions] == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        "[default]\nmin_gpus = 1\nmin_score = 0\ngpu_fraction = 1",
        "[default]\nmin_score = 1\ngpu_fraction = 0.01\ninteractive.max_gpus = 0",
        "[evidence]\nmin_dimensions = 2",
        "[limits]\ncancel = 0",
        "[keep]\nmin_why = 0",
        "[epilog]\nwait = '10s'",
        "[mail.smtp]\nport = 1",
        "[mail.smtp]\nport = 65535",
        "[mail.smtp]\nhost = '127.0.0.1'\nuser = 'u'",
        "[mail.smtp]\nhost = 'mail.example.org'\ntls = 'starttls'\nuser = 'u'",
        "[default.fixed]\nfirst_warning = '1h'\ncancel = '61m'",
    ],
)
def test_values_at_their_bounds_are_valid(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[default]\nmin_gpus = 0", "0 is below 1"),
        ("[default]\nmin_score = 1.01", "1.01 is not from 0 to 1"),
        ("[default]\ngpu_fraction = 1.01", "1.01 is not above 0 and up to 1"),
        ("[default]\ninteractive.max_gpus = -1", "-1 is below 0"),
        ("[keep]\nmin_why = -1", "-1 is below 0"),
        ("[mail.smtp]\nport = 0", "0 is not from 1 to 65535"),
        ("[mail.smtp]\nport = 65536", "65536 is not from 1 to 65535"),
        ("[default.fixed]\nfirst_warning = '1h'\ncancel = '1h'", "is not after first_warning"),
    ],
)
def test_values_beyond_their_bounds_are_reported(text: str, expected: str) -> None:
    assert any(expected in message for _, message in faults(text)), faults(text)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("\n\nlimits = 3", 3, "limits: a table is needed"),
        ("[limits]\n\ncancle = 3", 3, "limits.cancle: unknown key"),
        ("[limits]\ncancel = -1", 2, "limits.cancel: -1 is below 0"),
        ("[limits]\ncancel = true", 2, "not a whole number"),
        ("[evidence]\nmin_dimensions = 1", 2, "1 is below 2"),
        ("[default]\naction = 'shoot'", 2, "is not one of none, warn, cancel"),
        ("[default]\nfixed = { first_warning = '1h', cancel = 'soon' }", 2, "'soon' is not a span"),
        ("[default.fixed]\nfirst_warning = '2h'\ncancel = '1h'", 3, "is not after first_warning"),
        ("[default.fixed]\ncancel = '1h'", 2, "there is no warning before"),
        ("[default.fixed]\nsecond_warning = '1h'", 2, "no first_warning"),
        ("[[rule]]\nusers = ['a']\n[[rule]]\nusers = 7", 4, "rule[2].users: 7 is not a list of strings"),
        ("[[rule]]\nkinds = ['squater']", 2, "'squater' is not one of "),
        ("[[rule]]\nusers = ['a']\naction = 'cancel'", 3, "cancel is only for idle-allocation, squatter"),
        ("[[rule]]\nkinds = ['squatter']\naction = 'kill'", 3, "kill is only for orphan-process"),
        ("[[rule]]\nkinds = ['model-server']\naction = 'suspend'", 3, "suspend is only for diagnoses of model servers"),
        ("[[rule]]\naction = 'suspend'", 2, "suspend is only for diagnoses of model servers"),
        ("[[rule]]\ndiagnoses = ['idle', 'stalled']\naction = 'suspend'", 3, "suspend is only for the diagnoses idle"),
        ("[[rule]]\ndiagnoses = ['idle']\naction = 'kill'", 3, "kill is only for the diagnoses orphaned-engine"),
        ("[[rule]]\ndiagnoses = ['orphaned-engine']\naction = 'cancel'", 3, "cancel is not for diagnoses"),
        ("[[rule]]\nkinds = ['squatter']\ndiagnoses = ['idle']\naction = 'suspend'", 4, "suspend is only for"),
        ("[[rule]]\ndiagnoses = ['healthy']", 2, "'healthy' is not one of idle, "),
        ("[rule]\naction = 'warn'", 1, "is a list of tables"),
        ("[[exempt]]\nuntil = 2027-01-01\nreason = 'x'", 1, "exempt everything"),
        ("[[exempt]]\nusers = ['a']\nreason = 'x'", 1, "until is missing"),
        ("[[exempt]]\nusers = ['a']\nuntil = 'soon'\nreason = 'x'", 3, "is not a day"),
        ("[calendar]\ntimezone = 'Europe/Berlni'", 2, "not a time zone"),
        ("[calendar]\nhours = '18-08'", 2, "not a part of a day"),
        ("[calendar]\nholidays = [\n'02-30']", 2, "not a day of a year"),
        ("[calendar]\nworking_days = ['someday']", 2, "not a day of the week"),
        ("[calendar]\nworking_days = ['mon-fri']", 2, "not a day of the week"),
        ("[[rule]]\nusers = []\naction = 'none'", 2, "the list is empty"),
        ("[[exempt]]\nusers = ['a']\nkinds = []\nuntil = 'never'\nreason = 'x'", 3, "the list is empty"),
        ("[[rule]]\nusers = 'alice,bob'", 2, "write each by itself"),
        ("[[rule]]\nusers = ['alice ']", 2, "write each by itself"),
        ("[[rule]]\naccounts = ['phys[12]']", 2, "patterns are * and ?"),
        ("[[rule]]\njobs = ['123_[1-15]']", 2, "patterns are * and ?"),
        ("[[rule]]\njobs = ['job 123']", 2, "not a job ID"),
        ("[epilog]\nwait = '1m'", 2, "more than 10 s"),
        ("[mail]\nvia = 'command'", 2, "mail.command is missing"),
        ("[mail]\naddress = 'all@example.org'", 2, "{user}"),
        ('[mail]\nadmins = ["a@b\\r\\nBcc: c@d"]', 2, "not a mail address"),
        ("[mail]\nwebhook = 'file:///etc/passwd'", 2, "http"),
        ("[mail]\nlanguages = { carol = '../x' }", 2, "is not a language"),
        ("[mail.smtp]\nport = 70000", 2, "70000 is not from 1 to 65535"),
        ("[mail.smtp]\ntimeout = '0s'", 2, "not above 0"),
        ("[mail]\nsmtp = { host = 'mail.example.org', user = 'u' }", 2, "in the clear"),
        ("[default]\ngpu_fraction = 0", 2, "0 is not above 0 and up to 1"),
        ("[default]\nx y", 2, ""),
        ("[default]\nmin_run = '1h'\nmin_run = '2h'", 3, ""),
        ("zombies = 1", 1, "unknown key"),
    ],
)
def test_mistakes_are_reported_by_line(text: str, line: int, expected: str) -> None:
    """The message has the key and the allowed values."""
    assert any(where == line and expected in message for where, message in faults(text)), faults(text)


def test_all_mistakes_are_found_and_the_first_is_raised() -> None:
    """The error has file and line, and the number of further mistakes."""
    text = "[limits]\ncancel = 'x'\nkil = 3\n[default]\naction = 1"
    assert [line for line, _ in faults(text)] == [2, 3, 5]
    with pytest.raises(InputError, match=r"^z\.toml:2: limits\.cancel: .* \(and 2 more\)$") as caught:
        parse_policy(text, where="z.toml")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("action", sorted(ACTION_KINDS))
def test_action_is_for_all_of_its_kinds_and_diagnoses(action: str) -> None:
    kinds, diagnoses = sorted(ACTION_KINDS[action]), sorted(ACTION_DIAGNOSES.get(action, ()))
    text = f"[[rule]]\naction = '{action}'\nkinds = {kinds}\n" + (f"diagnoses = {diagnoses}\n" if diagnoses else "")
    assert faults(text) == []
    other = next(kind for kind in KINDS if kind not in kinds)
    assert any("is only for" in message for _, message in faults(text.replace(str(kinds), str([*kinds, other]))))


@pytest.mark.parametrize(("key", "action"), [("diagnoses", "suspend"), ("kinds", "kill")])
def test_unknown_name_is_reported_once(key: str, action: str) -> None:
    """Its rule names something, even if no such kind or diagnosis exists."""
    [(line, message)] = faults(f"[[rule]]\n{key} = ['idel']\naction = '{action}'")
    assert (line, "'idel' is not one of" in message) == (2, True)


def test_action_that_is_not_for_diagnoses_names_the_remedy() -> None:
    """The rule has the right kind."""
    text = "[[rule]]\nkinds = ['squatter']\ndiagnoses = ['idle']\naction = 'cancel'"
    [fault] = read_policy(text, where="z")[1]
    assert (fault.line, fault.message) == (4, "rule[1].action: cancel is not for diagnoses of model servers")
    assert fault.hint == "leave diagnoses out of this rule"


def test_similar_key_is_suggested() -> None:
    [fault] = read_policy("[default]\nmin_runs = '1h'", where="z")[1]
    assert fault.hint == "is min_run meant?"


def test_working_time_follows_the_calendar_of_the_site() -> None:
    """It has a time zone, working hours, and holidays with and without a year."""
    calendar = parse_policy(WHOLE, where="z").calendar
    assert working_now(calendar, datetime(2026, 11, 17, 7, 30, tzinfo=UTC))
    assert not working_now(calendar, datetime(2026, 11, 17, 7, 29, tzinfo=UTC))
    assert not working_now(calendar, datetime(2026, 11, 18, 12, tzinfo=UTC))
    assert not working_now(calendar, datetime(2026, 11, 16, 12, tzinfo=UTC))
    assert not working_now(calendar, datetime(2028, 12, 25, 12, tzinfo=UTC))


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_has_mistakes(text: str) -> None:
    """No exception is raised."""
    policy, wrong = read_policy(text, where="z")
    assert isinstance(policy, Policy)
    assert all(fault.line >= 1 for fault in wrong)


_VALUE = st.recursive(
    st.one_of(st.sampled_from(['"1h"', "3", "-1", "true", '"x"', "1.5", "2026-01-01", '"mon"'])),
    lambda inner: st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]"),
    max_leaves=4,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["limits", "default", "calendar", "mail", "keep", "epilog", "evidence"]),
            st.sampled_from(["cancel", "fixed", "hours", "smtp", "admins", "max", "wait", "max_age", "holidays"]),
            _VALUE,
        ),
        max_size=4,
        unique_by=lambda row: row[0],
    )
)
def test_invalid_values_are_reported_with_their_line(rows: list[tuple[str, str, str]]) -> None:
    """No exception is raised, and each line is that of a key."""
    text = "".join(f"[{table}]\n{key} = {value}\n" for table, key, value in rows)
    _, wrong = read_policy(text, where="z")
    assert all(fault.line % 2 == 0 for fault in wrong)
