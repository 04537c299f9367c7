"""Reading and checking of the policy file, with the line of each error. Keys, defaults: ``docs/zombies-policy.md``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.toml_lines import Key, TomlFault
from slurm_affinode.base.toml_schema import (
    CheckedKind,
    Kind,
    TomlEntries,
    TomlError,
    TomlFile,
    TomlTable,
    checked,
    either,
    number,
    seconds,
    text,
    whole,
    within,
    yes_no,
)
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


def _from(low: int, high: int | None = None) -> CheckedKind:
    return checked(whole, within(low, high))


def _word(*words: str) -> CheckedKind:
    return checked(text, either(*words))


_STAGES: dict[str, Kind] = {"first_warning": seconds, "second_warning": seconds, "cancel": seconds}
_INTERACTIVE: dict[str, Kind] = {"max_run": seconds, "max_gpus": _from(0), "extra": seconds}
_SETTINGS: dict[str, Kind] = {
    "action": _word("none", "warn", "cancel", "suspend", "kill", "drain", "resume"),
    "fixed": TomlTable(_STAGES), "sliding": TomlTable(_STAGES), "interactive": TomlTable(_INTERACTIVE),
    "min_run": seconds, "min_gpus": _from(1), "gpu_fraction": checked(number, within(0, 1, above=True)),
    "min_score": checked(number, within(0, 1)), "mappings": values.words(*MAPPINGS),
    "do_not_cancel": yes_no, "prefer_suspend": yes_no, "cancel_steps": yes_no, "warn_user": yes_no,
    "warn_admins": yes_no, "cancel_working_days_only": yes_no, "warn_working_days_only": yes_no, "grace": seconds,
    "repeat": seconds,
}  # fmt: skip
_MATCH: dict[str, Kind] = {
    **dict.fromkeys(SCOPES, values.patterns), "nodes": values.host_lists, "kinds": values.words(*KINDS),
    "jobs": values.job_patterns, "diagnoses": values.words(*PROBLEMS),
}  # fmt: skip
_SPANS = frozenset({"min_run", "grace", "repeat", "max_run", "extra", "first_warning", "second_warning", "cancel"})
_TOP = ("limits", "evidence", "calendar", "default", "rule", "exempt", "keep", "mail", "epilog")


def read_policy(source: str, *, where: str, expand: Expand | None = None) -> tuple[Policy, tuple[TomlFault, ...]]:
    """Return a policy and its faults, by line. Invalid values get their defaults: do not use a policy with faults.

    ``expand``: expands host lists to node names; without it, host lists are treated as patterns.
    """
    file = TomlFile(source)
    data = {key: value for key, value in file.data.items() if file.check_name(key, _TOP, ())}
    limits = file.table(data.get("limits", {}), ("limits",), dict.fromkeys(Limits.__slots__, _from(0)))
    evidence = file.table(data.get("evidence", {}), ("evidence",), {"max_age": seconds, "min_dimensions": _from(2)})
    default, _ = _settings(file, data.get("default", {}), ("default",), Settings(), {})
    policy = Policy(
        default=default,
        rules=_rules(file, expand),
        exemptions=_exemptions(file, expand),
        calendar=_calendar(file, data.get("calendar", {})),
        limits=Limits(**limits),
        max_evidence_age_s=evidence.get("max_age", Policy.__dataclass_fields__["max_evidence_age_s"].default),
        min_dimensions=evidence.get("min_dimensions", 2),
        mail=_mail(file, data.get("mail", {})),
        keep=_keep(file, data.get("keep", {})),
        epilog=_epilog(file, data.get("epilog", {})),
        where=where,
    )
    return policy, file.faults


def parse_policy(source: str, *, where: str, expand: Expand | None = None) -> Policy:
    """Return a policy. Raises ``TomlError`` with all faults."""
    policy, faults = read_policy(source, where=where, expand=expand)
    if faults:
        raise TomlError(where, faults)
    return policy


def _settings(
    file: TomlFile, data: Any, path: Key, base: Settings, extra: Mapping[str, Kind]
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of a table, and all its values, including those of the ``extra`` keys."""
    entries = file.table(data, path, {**_SETTINGS, **extra})
    changes: dict[str, Any] = {}
    for key in ("fixed", "sliding"):
        if key in entries:
            changes[key] = Stages(**{f"{name}_s": value for name, value in entries[key].items()})
            _check_stages(file, (*path, key), changes[key])
    if "interactive" in entries:
        changes["interactive"] = Interactive(**_suffixed(entries["interactive"]))
    plain = {key: value for key, value in entries.items() if key in _SETTINGS and key not in changes}
    changes |= _suffixed(plain)
    return replace(base, **changes), entries


def _suffixed(table: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}_s" if key in _SPANS else key: value for key, value in table.items()}


def _check_stages(file: TomlFile, path: Key, stages: Stages) -> None:
    order = [("first_warning", stages.first_warning_s), ("second_warning", stages.second_warning_s),
             ("cancel", stages.cancel_s)]  # fmt: skip
    present_stages = [(name, value) for name, value in order if value is not None]
    for (name, value), (later, then) in itertools.pairwise(present_stages):
        if then <= value:
            file.fault((*path, later), f"is not after {name}")
    if stages.second_warning_s is not None and stages.first_warning_s is None:
        file.fault((*path, "second_warning"), "there is no first_warning")
    if stages.cancel_s is not None and stages.first_warning_s is None:
        file.fault(
            (*path, "cancel"), "there is no warning before", "add first_warning: nothing is canceled without a warning"
        )


def _rules(file: TomlFile, expand: Expand | None) -> tuple[Rule, ...]:
    rules = []
    for index, table in enumerate(file.tables("rule")):
        path = ("rule", index)
        settings, entries = _settings(file, table, path, Settings(), {**_MATCH, "name": text})
        sets = frozenset(key for key in entries if key in _SETTINGS)
        match = _match(file, expand, entries, path)
        action = entries.get("action")
        kinds = ACTION_KINDS.get(action or "")
        unread = isinstance(table, dict) and any(key in table and key not in entries for key in ("kinds", "diagnoses"))
        wrong = None if kinds is None or unread else _fault_of_action(str(action), kinds, match)
        if wrong is not None:
            file.fault((*path, "action"), *wrong)
        rules.append(Rule(entries.get("name", f"rule {index + 1}"), match, settings, sets, file.line(path)))
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


def _exemptions(file: TomlFile, expand: Expand | None) -> tuple[Exemption, ...]:
    exemptions = []
    for index, table in enumerate(file.tables("exempt")):
        path = ("exempt", index)
        keys = {**_MATCH, "until": values.day, "reason": text, "warnings": yes_no}
        row = file.table(table, path, keys)
        match = _match(file, expand, row, path)
        if match == Match():
            file.fault(path, "it would exempt everything", "name users, accounts, jobs, partitions, ...")
        if isinstance(table, dict) and "until" not in table:
            file.fault(path, "until is missing", 'write until = 2027-03-31, or until = "never"')
        if isinstance(table, dict) and "reason" not in table:
            file.fault(path, "reason is missing", "give a reason, which is recorded in the audit")
        exemptions.append(
            Exemption(
                match, row.get("until", NEVER), row.get("reason", ""), row.get("warnings", False),
                file.line(path),
            )
        )  # fmt: skip
    return tuple(exemptions)


def _match(file: TomlFile, expand: Expand | None, row: Mapping[str, Any], path: Key) -> Match:
    fields = {key: row[key] for key in _MATCH if key in row}
    if expand is not None and "nodes" in fields:
        nodes: list[str] = []
        for hosts in fields["nodes"]:
            try:
                members = expand(hosts)
            except InputError as error:
                file.fault((*path, "nodes"), str(error))
                continue
            if not members:
                file.fault((*path, "nodes"), f"{hosts!r} names no node")
            nodes += members
        fields["nodes"] = tuple(nodes)
    return Match(**fields)


def _calendar(file: TomlFile, data: Any) -> Calendar:
    keys: dict[str, Kind] = {
        "timezone": values.zone, "working_days": values.weekdays, "hours": values.hours, "holidays": values.holidays,
    }  # fmt: skip
    entries = file.table(data, ("calendar",), keys)
    calendar = Calendar(entries.get("timezone"))
    if "working_days" in entries:
        calendar = replace(calendar, working_days=frozenset(entries["working_days"]))
    if "hours" in entries:
        calendar = replace(calendar, begin=entries["hours"][0], end=entries["hours"][1])
    once, yearly = entries.get("holidays", (frozenset(), frozenset()))
    return replace(calendar, holidays=once, yearly=yearly)


def _keep(file: TomlFile, data: Any) -> KeepPolicy:
    entries = file.table(data, ("keep",), {"allow": yes_no, "max": seconds, "min_why": _from(0)})
    base = KeepPolicy()
    return KeepPolicy(
        entries.get("allow", base.allow), entries.get("max", base.max_s), entries.get("min_why", base.min_why)
    )


EPILOG_WAIT_S = 10.0
"""Maximum of ``epilog.wait``. An epilog may wait twice as long (processes, then memory), and a node waits for it."""


def _epilog(file: TomlFile, data: Any) -> EpilogPolicy:
    wait = checked(seconds, values.up_to(EPILOG_WAIT_S))
    entries = file.table(data, ("epilog",), {"dirty": _word("report", "drain"), "kill": yes_no, "wait": wait})
    base = EpilogPolicy()
    return EpilogPolicy(
        entries.get("dirty", base.dirty), entries.get("kill", base.kill), entries.get("wait", base.wait_s)
    )


_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_SMTP: dict[str, Kind] = {
    "host": text, "port": _from(1, 65535), "tls": _word("none", "starttls", "tls"), "user": text,
    "password_file": text, "timeout": checked(seconds, within(0, above=True)), "ca_file": text,
}  # fmt: skip


def _mail(file: TomlFile, data: Any) -> MailPolicy:
    keys: dict[str, Kind] = {
        "via": _word("none", "smtp", "command", "webhook"), "sender": values.address,
        "address": values.address_pattern, "addresses": TomlEntries(values.address), "admins": values.addresses,
        "reply_to": values.address, "language": values.language, "languages": TomlEntries(values.language),
        "templates": text, "smtp": TomlTable(_SMTP), "command": values.texts, "webhook": values.url,
        "webhook_format": _word("json", "slack", "mattermost", "teams"), "webhook_token_file": text,
        "help_url": values.url,
    }  # fmt: skip
    entries = file.table(data, ("mail",), keys)
    if "smtp" in entries:
        table = entries["smtp"]
        if (
            table.get("user")
            and table.get("tls", "none") == "none"
            and table.get("host", "localhost") not in _LOCAL_HOSTS
        ):
            file.fault(("mail", "smtp", "user"), "its password would go over the network in the clear",
                         hint='tls = "starttls" or "tls"')  # fmt: skip
        entries["smtp"] = Smtp(**{"timeout_s" if key == "timeout" else key: value for key, value in table.items()})
    via = entries.get("via", "none")
    if via in ("command", "webhook") and not entries.get(via):
        file.fault(("mail", "via"), f"is {via}, and mail.{via} is missing")
    return MailPolicy(**entries)


def working_now(calendar: Calendar, now: datetime) -> bool:
    """Return whether ``now`` is within working time."""
    return calendar.working(now.astimezone(values.zone_of(calendar.timezone)))
