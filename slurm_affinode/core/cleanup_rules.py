"""Which rules of a policy a finding falls under, and what they say together."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date

from slurm_affinode.model.cleanup import SCOPES, Exemption, Match, Policy, Settings
from slurm_affinode.model.finding import Finding

_FIELDS = {
    "min_run": "min_run_s", "grace": "grace_s", "repeat": "repeat_s",
}  # fmt: skip
"""Key of the file -> field of ``Settings``, where the two differ."""
_WHOLE = re.compile(r"^\d+")
"""Of an id: the array, or the heterogeneous job, that it is a part of."""


@dataclass(frozen=True, slots=True)
class Effective:
    """What counts for a finding, and who says so."""

    settings: Settings
    rules: tuple[str, ...]
    """Names of the rules, the most specific last; empty: the defaults alone."""
    origin: dict[str, str]
    """Key -> name of the rule that sets it; keys that are not there have the default."""

    @property
    def rule(self) -> str:
        """The rule that says what is done."""
        return self.origin.get("action") or (self.rules[-1] if self.rules else "default")


def matches(match: Match, finding: Finding) -> bool:
    """Whether a finding is meant: every list that is not empty has to fit. Patterns: ``*`` and ``?``."""
    job = finding.job
    given: dict[str, Iterable[str | None]] = {
        "clusters": (finding.cluster,),
        "partitions": (finding.partition or "").split(","),
        "nodes": finding.nodes,
        "qos": (finding.qos,),
        "accounts": (finding.account,),
        "users": (finding.user,),
        "kinds": (finding.kind,),
        "jobs": () if job is None else (job.id, str(job.job_id), *_WHOLE.findall(job.id)),
    }
    return all(_fits(getattr(match, key), found) for key, found in given.items())


def _fits(patterns: tuple[str, ...], found: Iterable[str | None]) -> bool:
    if not patterns:
        return True
    return any(fnmatch.fnmatchcase(one, pattern) for one in found if one for pattern in patterns)


def specificity(match: Match) -> tuple[bool, ...]:
    """Order of rules: one about a user beats one about an account, and so on down to the cluster; then kinds."""
    return (bool(match.jobs), *(bool(getattr(match, scope)) for scope in reversed(SCOPES)), bool(match.kinds))


def effective(policy: Policy, finding: Finding) -> Effective:
    """The defaults, overridden by every rule that fits, the most specific last; of two alike the later one."""
    settings, origin = policy.default, {}
    fitting = [rule for rule in policy.rules if matches(rule.match, finding)]
    fitting.sort(key=lambda rule: (specificity(rule.match), rule.line))
    for rule in fitting:
        names = {key: _FIELDS.get(key, key) for key in rule.sets}
        settings = replace(settings, **{name: getattr(rule.settings, name) for name in names.values()})
        origin.update(dict.fromkeys(names, rule.name))
    return Effective(settings, tuple(rule.name for rule in fitting), origin)


def exemption(policy: Policy, finding: Finding, today: date) -> Exemption | None:
    """The exemption that a finding falls under today; the one that lasts longest."""
    fitting = [one for one in policy.exemptions if one.until >= today and matches(one.match, finding)]
    return max(fitting, key=lambda one: (not one.warnings, one.until), default=None)
