"""Reading and checking of the policy file, with the line of each error. Keys, defaults: ``docs/zombies-policy.md``."""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.toml_lines import Lines, syntax_fault
from slurm_affinode.core import policy_values as values
from slurm_affinode.model.cleanup import (
    NEVER,
    SCOPES,
    Calendar,
    EpilogPolicy,
    Exemption,
    Interactive,
    KeepPolicy,
    Limits,
    MailPolicy,
    Match,
    Policy,
    Rule,
    Settings,
    Smtp,
    Stages,
)  # fmt: skip
from slurm_affinode.model.finding import IDLE_KINDS, KINDS, MAPPINGS
from slurm_affinode.model.serving import PROBLEMS

Expand = Callable[[str], tuple[str, ...]]
"""Expands a Slurm host list to node names. Raises ``InputError``."""

ACTION_KINDS: Mapping[str, frozenset[str]] = {
    "cancel": IDLE_KINDS,
    "suspend": frozenset({"model-server"}),
    "kill": frozenset({"orphan-process", "orphaned-engine"}),
    "drain": frozenset({"orphan-process", "orphan-memory", "completing"}),
    "resume": frozenset({"drained-kill-failed"}),
}
"""Action -> kinds of finding that it applies to."""
ACTION_DIAGNOSES: Mapping[str, frozenset[str]] = {
    "suspend": frozenset({"idle", "squatter-signature"}), "kill": frozenset({"orphaned-engine"}),
}  # fmt: skip
"""Action -> diagnoses of model servers that it applies to."""


@dataclass(frozen=True, slots=True)
class PolicyFault:
    """An error in a policy file."""

    line: int
    message: str
    hint: str | None = None


@dataclass(slots=True)
class _Reader:
    lines: Lines
    expand: Expand | None
    faults: list[PolicyFault] = field(default_factory=list)

    def fault(self, path: tuple[str | int, ...], message: str, hint: str | None = None) -> None:
        self.faults.append(PolicyFault(self.lines.of(*path), f"{_shown(path)}: {message}", hint))

    def table(self, data: Any, path: tuple[str | int, ...], known: Mapping[str, values.Kind]) -> dict[str, Any]:
        """Return the valid values of a table; record a fault for each other one."""
        if not isinstance(data, dict):
            self.fault(path, "a table is needed")
            return {}
        found: dict[str, Any] = {}
        for key, value in data.items():
            kind = known.get(key)
            if kind is None:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"is {close[0]} meant?" if close else f"known here: {', '.join(sorted(known))}"
                self.fault((*path, key), "unknown key", hint)
                continue
            try:
                found[key] = kind(value)
            except ValueError as error:
                self.fault((*path, key), str(error))
        return found


def _shown(path: tuple[str | int, ...]) -> str:
    text = ""
    for word in path:
        text += f"[{word + 1}]" if isinstance(word, int) else f".{word}" if text else word
    return text


_STAGES: dict[str, values.Kind] = {
    "first_warning": values.span, "second_warning": values.span, "cancel": values.span,
}  # fmt: skip
_INTERACTIVE: dict[str, values.Kind] = {
    "max_run": values.span, "max_gpus": values.whole(0), "extra": values.span,
}  # fmt: skip
_SETTINGS: dict[str, values.Kind] = {
    "action": values.one_of("none", "warn", "cancel", "suspend", "kill", "drain", "resume"),
    "fixed": values.anything, "sliding": values.anything, "interactive": values.anything,
    "min_run": values.span, "min_gpus": values.whole(1), "gpu_fraction": values.number(0, 1, above=True),
    "min_score": values.number(0, 1), "mappings": values.texts_of(*MAPPINGS),
    "do_not_cancel": values.yes_no, "prefer_suspend": values.yes_no,
    "cancel_steps": values.yes_no, "warn_user": values.yes_no, "warn_admins": values.yes_no,
    "cancel_working_days_only": values.yes_no, "warn_working_days_only": values.yes_no, "grace": values.span,
    "repeat": values.span,
}  # fmt: skip
_MATCH: dict[str, values.Kind] = {
    **dict.fromkeys(SCOPES, values.patterns), "nodes": values.host_lists, "kinds": values.texts_of(*KINDS),
    "jobs": values.job_patterns, "diagnoses": values.texts_of(*PROBLEMS),
}  # fmt: skip
_SPANS = frozenset({"min_run", "grace", "repeat", "max_run", "extra", "first_warning", "second_warning", "cancel"})
_TOP = ("limits", "evidence", "calendar", "default", "rule", "exempt", "keep", "mail", "epilog")


def read_policy(text: str, *, where: str, expand: Expand | None = None) -> tuple[Policy, tuple[PolicyFault, ...]]:
    """Return a policy and its faults, by line. Invalid values get their defaults: do not use a policy with faults.

    ``expand``: expands host lists to node names; without it, host lists are treated as patterns.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fault = syntax_fault(error, text)
        return Policy(where=where), (PolicyFault(fault.line, fault.message, fault.hint),)
    reader = _Reader(Lines(text), expand)
    for key in data:
        if key not in _TOP:
            close = difflib.get_close_matches(key, _TOP, 1)
            hint = f"is {close[0]} meant?" if close else f"known here: {', '.join(_TOP)}"
            reader.fault((key,), "unknown key", hint)
    limits = reader.table(data.get("limits", {}), ("limits",), dict.fromkeys(Limits.__slots__, values.whole(0)))
    evidence = reader.table(
        data.get("evidence", {}), ("evidence",), {"max_age": values.span, "min_dimensions": values.whole(2)}
    )
    default, _ = _settings(reader, data.get("default", {}), ("default",), Settings(), {})
    policy = Policy(
        default=default,
        rules=_rules(reader, data.get("rule", [])),
        exemptions=_exemptions(reader, data.get("exempt", [])),
        calendar=_calendar(reader, data.get("calendar", {})),
        limits=Limits(**limits),
        max_evidence_age_s=evidence.get("max_age", Policy.__dataclass_fields__["max_evidence_age_s"].default),
        min_dimensions=evidence.get("min_dimensions", 2),
        mail=_mail(reader, data.get("mail", {})),
        keep=_keep(reader, data.get("keep", {})),
        epilog=_epilog(reader, data.get("epilog", {})),
        where=where,
    )
    return policy, tuple(sorted(reader.faults, key=lambda fault: fault.line))


def parse_policy(text: str, *, where: str, expand: Expand | None = None) -> Policy:
    """Return a policy. Raises ``InputError`` with file and line of the first fault and the number of further ones."""
    policy, faults = read_policy(text, where=where, expand=expand)
    if faults:
        first = faults[0]
        more = f" (and {len(faults) - 1} more: slurm-affinode zombies policy check {where})" if len(faults) > 1 else ""
        raise InputError(f"{first.message}{more}", where=f"{where}:{first.line}", hint=first.hint)
    return policy


def _settings(
    reader: _Reader, data: Any, path: tuple[str | int, ...], base: Settings, extra: Mapping[str, values.Kind]
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of a table, and all its values, including those of the ``extra`` keys."""
    found = reader.table(data, path, {**_SETTINGS, **extra})
    changes: dict[str, Any] = {}
    for key in ("fixed", "sliding"):
        if key in found:
            stages = reader.table(found[key], (*path, key), _STAGES)
            changes[key] = Stages(**{f"{name}_s": value for name, value in stages.items()})
            _check_stages(reader, (*path, key), changes[key])
    if "interactive" in found:
        table = reader.table(found["interactive"], (*path, "interactive"), _INTERACTIVE)
        changes["interactive"] = Interactive(**_suffixed(table))
    plain = {key: value for key, value in found.items() if key in _SETTINGS and key not in changes}
    changes |= _suffixed(plain)
    return replace(base, **changes), found


def _suffixed(table: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}_s" if key in _SPANS else key: value for key, value in table.items()}


def _check_stages(reader: _Reader, path: tuple[str | int, ...], stages: Stages) -> None:
    order = [("first_warning", stages.first_warning_s), ("second_warning", stages.second_warning_s),
             ("cancel", stages.cancel_s)]  # fmt: skip
    there = [(name, value) for name, value in order if value is not None]
    for (name, value), (later, then) in itertools.pairwise(there):
        if then <= value:
            reader.fault((*path, later), f"is not after {name}")
    if stages.second_warning_s is not None and stages.first_warning_s is None:
        reader.fault((*path, "second_warning"), "there is no first_warning")
    if stages.cancel_s is not None and stages.first_warning_s is None:
        reader.fault(
            (*path, "cancel"), "there is no warning before", "add first_warning: nothing is canceled without a warning"
        )


def _rules(reader: _Reader, data: Any) -> tuple[Rule, ...]:
    rules = []
    for number, table in enumerate(_tables(reader, data, "rule")):
        path = ("rule", number)
        settings, found = _settings(reader, table, path, Settings(), {**_MATCH, "name": values.text})
        sets = frozenset(key for key in found if key in _SETTINGS)
        match = _match(reader, found, path)
        action = found.get("action")
        kinds = ACTION_KINDS.get(action or "")
        unread = isinstance(table, dict) and any(key in table and key not in found for key in ("kinds", "diagnoses"))
        wrong = None if kinds is None or unread else _fault_of_action(str(action), kinds, match)
        if wrong is not None:
            reader.fault((*path, "action"), *wrong)
        rules.append(Rule(found.get("name", f"rule {number + 1}"), match, settings, sets, reader.lines.of(*path)))
    return tuple(rules)


def _fault_of_action(action: str, kinds: frozenset[str], match: Match) -> tuple[str, str] | None:
    """Return message and hint if a rule may apply to findings that its action is not for."""
    diagnoses = ACTION_DIAGNOSES.get(action, frozenset())
    if match.diagnoses and diagnoses:
        if set(match.diagnoses) <= diagnoses and set(match.kinds) <= kinds:
            return None
        return f"{action} is only for the diagnoses {', '.join(sorted(diagnoses))}", "use a rule of its own for others"
    if action == "suspend":
        return "suspend is only for diagnoses of model servers", 'name them in the same rule: diagnoses = ["idle"]'
    if match.diagnoses:
        return f"{action} is not for diagnoses of model servers", "leave diagnoses out of this rule"
    if match.kinds and set(match.kinds) <= kinds:
        return None
    return f"{action} is only for {', '.join(sorted(kinds))}", f'name them in the same rule: kinds = ["{min(kinds)}"]'


def _exemptions(reader: _Reader, data: Any) -> tuple[Exemption, ...]:
    found = []
    for number, table in enumerate(_tables(reader, data, "exempt")):
        path = ("exempt", number)
        known = {**_MATCH, "until": values.day, "reason": values.text, "warnings": values.yes_no}
        row = reader.table(table, path, known)
        match = _match(reader, row, path)
        if match == Match():
            reader.fault(path, "it would exempt everything", "name users, accounts, jobs, partitions, ...")
        if isinstance(table, dict) and "until" not in table:
            reader.fault(path, "until is missing", 'write until = 2027-03-31, or until = "never"')
        if isinstance(table, dict) and "reason" not in table:
            reader.fault(path, "reason is missing", "give a reason, which is recorded in the audit")
        found.append(
            Exemption(
                match, row.get("until", NEVER), row.get("reason", ""), row.get("warnings", False),
                reader.lines.of(*path),
            )
        )  # fmt: skip
    return tuple(found)


def _match(reader: _Reader, row: Mapping[str, Any], path: tuple[str | int, ...]) -> Match:
    fields = {key: row[key] for key in _MATCH if key in row}
    if reader.expand is not None and "nodes" in fields:
        nodes: list[str] = []
        for text in fields["nodes"]:
            try:
                found = reader.expand(text)
            except InputError as error:
                reader.fault((*path, "nodes"), str(error))
                continue
            if not found:
                reader.fault((*path, "nodes"), f"{text!r} names no node")
            nodes += found
        fields["nodes"] = tuple(nodes)
    return Match(**fields)


def _tables(reader: _Reader, data: Any, key: str) -> list[Any]:
    if not isinstance(data, list):
        reader.fault((key,), f"is a list of tables: write [[{key}]]")
        return []
    return data


def _calendar(reader: _Reader, data: Any) -> Calendar:
    known = {
        "timezone": values.zone, "working_days": values.weekdays, "hours": values.hours, "holidays": values.holidays,
    }  # fmt: skip
    found = reader.table(data, ("calendar",), known)
    calendar = Calendar(found.get("timezone"))
    if "working_days" in found:
        calendar = replace(calendar, working_days=found["working_days"])
    if "hours" in found:
        calendar = replace(calendar, begin=found["hours"][0], end=found["hours"][1])
    once, yearly = found.get("holidays", (frozenset(), frozenset()))
    return replace(calendar, holidays=once, yearly=yearly)


def _keep(reader: _Reader, data: Any) -> KeepPolicy:
    found = reader.table(
        data, ("keep",), {"allow": values.yes_no, "max": values.span, "min_why": values.whole(0)}
    )  # fmt: skip
    base = KeepPolicy()
    return KeepPolicy(found.get("allow", base.allow), found.get("max", base.max_s), found.get("min_why", base.min_why))


EPILOG_WAIT_S = 10.0
"""Maximum of ``epilog.wait``. An epilog may wait twice as long (processes, then memory), and a node waits for it."""


def _epilog(reader: _Reader, data: Any) -> EpilogPolicy:
    found = reader.table(
        data, ("epilog",),
        {"dirty": values.one_of("report", "drain"), "kill": values.yes_no, "wait": values.span_up_to(EPILOG_WAIT_S)},
    )  # fmt: skip
    base = EpilogPolicy()
    return EpilogPolicy(found.get("dirty", base.dirty), found.get("kill", base.kill), found.get("wait", base.wait_s))


_HERE = ("localhost", "127.0.0.1", "::1")


def _mail(reader: _Reader, data: Any) -> MailPolicy:
    known: dict[str, values.Kind] = {
        "via": values.one_of("none", "smtp", "command", "webhook"), "sender": values.address,
        "address": values.address_pattern, "addresses": values.address_table, "admins": values.addresses,
        "reply_to": values.address, "language": values.language, "languages": values.language_table,
        "templates": values.text, "smtp": values.anything, "command": values.texts, "webhook": values.url,
        "webhook_token_file": values.text, "help_url": values.url,
    }  # fmt: skip
    found = reader.table(data, ("mail",), known)
    if "smtp" in found:
        smtp: dict[str, values.Kind] = {
            "host": values.text, "port": values.whole(1, 65535), "tls": values.one_of("none", "starttls", "tls"),
            "user": values.text, "password_file": values.text, "timeout": values.span_above_0, "ca_file": values.text,
        }  # fmt: skip
        table = reader.table(found["smtp"], ("mail", "smtp"), smtp)
        if table.get("user") and table.get("tls", "none") == "none" and table.get("host", "localhost") not in _HERE:
            reader.fault(("mail", "smtp", "user"), "its password would go over the network in the clear",
                         hint='tls = "starttls" or "tls"')  # fmt: skip
        found["smtp"] = Smtp(**{"timeout_s" if key == "timeout" else key: value for key, value in table.items()})
    via = found.get("via", "none")
    if via in ("command", "webhook") and not found.get(via):
        reader.fault(("mail", "via"), f"is {via}, and mail.{via} is missing")
    return MailPolicy(**found)


def working_now(calendar: Calendar, now: datetime) -> bool:
    """Return whether ``now`` is within working time."""
    return calendar.working(now.astimezone(values.zone_of(calendar.timezone)))
