"""Reload of the configuration on SIGHUP: which keys take effect in a running agent, and which need a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import one_line

log = logging.getLogger(__name__)

RELOADED = {
    "agent": ("max_gap_periods", "min_signals", "floors_pct", "host", "admins"),
    "suspend": (
        "dry_run", "min_run", "backoff", "backoff_max", "exclude_users", "exclude_accounts", "exclude_partitions",
        "users", "accounts", "partitions",
    ),
    "inplace": ("max_turn", "short_sleep"),
}  # fmt: skip
"""Section -> keys that a running agent takes over: what counts as idle, the policy, and the administrators."""
_SECTIONS = ("store", "cluster", "slurm", "agent", "suspend", "inplace", "zombies")
"""Sections that the agent reads."""


@dataclass(frozen=True, slots=True)
class Reload:
    """The result of a comparison of two configurations."""

    config: Config
    """The previous one with the new values that take effect."""
    effective: tuple[str, ...]
    """Changed keys that take effect, as ``section.key``."""
    pending: tuple[str, ...]
    """Changed keys that need a restart."""

    @classmethod
    def of(cls, before: Config, after: Config) -> Reload:
        """Compare the configuration in effect with one that was read."""
        effective, pending, config = [], [], before
        for section, key in _changed(before, after):
            name = f"{section}.{key}"
            if key not in RELOADED.get(section, ()):
                pending.append(name)
                continue
            effective.append(name)
            values = replace(getattr(config, section), **{key: getattr(getattr(after, section), key)})
            config = replace(config, **{section: values})
        return cls(config, tuple(effective), tuple(pending))

    def __str__(self) -> str:
        """Return the result in one line."""
        if not self.effective and not self.pending:
            return "nothing has changed"
        effective = f"in effect: {', '.join(self.effective) or 'nothing'}"
        return f"{effective}; after a restart: {', '.join(self.pending)}" if self.pending else effective


def _changed(before: Config, after: Config) -> Iterator[tuple[str, str]]:
    for section in _SECTIONS:
        old, new = getattr(before, section), getattr(after, section)
        for key in fields(old):
            if getattr(old, key.name) != getattr(new, key.name):
                yield section, key.name


def reload(before: Config, read: Callable[[], Config], apply: Callable[[Config], None]) -> Config:
    """Read the configuration again, and apply what a running agent takes over; return the configuration in effect.

    Logs one line: what is in effect and what needs a restart, or why the previous configuration stays in effect.
    ``apply`` changes nothing if it raises ``AffinodeError``.
    """
    try:
        result = Reload.of(before, read())
        apply(result.config)
    except (AffinodeError, OSError) as error:
        why = one_line("; ".join(error.lines) if isinstance(error, AffinodeError) else error)
    else:
        log.info("the configuration is reloaded: %s", result)
        return result.config
    log.error("the configuration is not reloaded, the previous one stays in effect: %s", why)
    return before
