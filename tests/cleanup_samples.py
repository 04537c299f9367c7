"""A site policy and sent warnings, for tests of decisions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from zombie_samples import NOW, squatter

from slurm_affinode.core.cleanup_plan import decide
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.model.cleanup import Ledger, Policy, SentWarning
from slurm_affinode.model.finding import Finding

Stages = tuple[str, str, str]
"""Time from the start of a finding to its two warnings and to its cancellation."""


def rules(fixed: Stages, sliding: Stages, grace: str = "2m") -> str:
    """Return rules that cancel jobs with idle GPUs by those stages, and kill orphans after the grace time."""
    stages = 'first_warning = "{}", second_warning = "{}", cancel = "{}"'
    return f"""
[[rule]]
name = "idle"
kinds = ["squatter", "idle-allocation"]
action = "cancel"
fixed = {{ {stages.format(*fixed)} }}
sliding = {{ {stages.format(*sliding)} }}
[[rule]]
name = "orphans"
kinds = ["orphan-process"]
action = "kill"
grace = "{grace}"
"""


RULE = rules(fixed=("1h", "1h45m", "2h"), sliding=("1h", "90m", "2h"))
TWICE = (timedelta(minutes=80), timedelta(minutes=40))


def policy(more: str = "", rule: str = RULE) -> Policy:
    """Parse the rules above with additions of a test."""
    return parse_policy(rule + more, where="z.toml")


def warned(finding: Finding, *ago: timedelta) -> Ledger:
    """Return a ledger of warnings about the finding, each sent that long ago."""
    sent = tuple(SentWarning(finding.key, n, NOW - item) for n, item in enumerate(ago, 1))
    return Ledger({finding.key: sent})


def verdict(finding: Finding, more: str = "", ledger: Ledger | None = None, **options: Any) -> tuple[str, str, int]:
    """Return verb, code and number of the warning of the decision."""
    action = decide(finding, policy(more), ledger or Ledger(), NOW, **options)
    return action.verb, action.code, action.number


def due(more: str = "", **values: Any) -> tuple[str, str, int]:
    """Return the verdict on a job that was warned twice."""
    finding = squatter(**values)
    return verdict(finding, more, warned(finding, *TWICE))
