"""Conversion of the node's configuration into the values of the pure core."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from slurm_affinode.base.config import Config
from slurm_affinode.base.node_config import AgentConfig, InplaceConfig, LimitConfig, SuspendConfig
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.core.idle import IdleRule
from slurm_affinode.core.policy import Limit, SuspendPolicy
from slurm_affinode.model.suspension import SuspendOption


def idle_rule(agent: AgentConfig, option: SuspendOption) -> IdleRule:
    """Return the rule by which a job with ``option`` counts as idle."""
    return IdleRule(
        window_s=option.window_s,
        util_pct=option.util_pct,
        floors_pct=agent.floors_pct,
        host_limits=agent.host,
        max_gap_s=agent.max_gap_periods * parse_span_s(agent.period),
        min_signals=agent.min_signals,
    )


def policy(suspend: SuspendConfig, inplace: InplaceConfig) -> SuspendPolicy:
    """Return the policy of ``[suspend]`` and ``[inplace]``, with spans in seconds.

    Raises ``AffinodeError`` for an invalid span.
    """
    return SuspendPolicy(
        min_run_s=parse_span_s(suspend.min_run),
        max_at_once=suspend.max_at_once,
        backoff_s=parse_span_s(suspend.backoff),
        backoff_max_s=parse_span_s(suspend.backoff_max),
        short_sleep_s=parse_span_s(inplace.short_sleep),
        max_turn_s=parse_span_s(inplace.max_turn),
        partitions=_rules(suspend.partitions, suspend.exclude_partitions),
        accounts=_rules(suspend.accounts, suspend.exclude_accounts),
        users=_rules(suspend.users, suspend.exclude_users),
        dry_run=suspend.dry_run,
    )


def _rules(named: Mapping[str, LimitConfig], excluded: tuple[str, ...]) -> Mapping[str, Limit]:
    rules = {
        name: Limit(value.max_suspended, None if value.min_run is None else parse_span_s(value.min_run), value.exclude)
        for name, value in named.items()
    }
    for name in excluded:
        rule = rules.get(name, Limit())
        rules[name] = Limit(rule.max_suspended, rule.min_run_s, exclude=True)
    return rules


def node_name(config: Config) -> str:
    """Return this node's name in Slurm."""
    return config.agent.node or socket.gethostname().partition(".")[0]
