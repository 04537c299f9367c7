"""Reload of the agent's configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent_stand_ins import Node1, agent, config_of, watched
from waiting import wait_until

from slurm_affinode.agent.reload import Reload, reload
from slurm_affinode.agent.requests import Caller
from slurm_affinode.base.config import Config, parse
from slurm_affinode.base.errors import AffinodeError, ConfigError


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node1]:
    with agent(config_of(tmp_path)) as started:
        yield started


def test_changed_keys_are_effective_or_pending() -> None:
    """A setting that needs a restart keeps its previous value, and is named again by the next reload."""
    before = Config()
    after = parse(
        """
        [agent]
        admins = ["alice"]
        period = "1s"
        [suspend]
        min_run = "1h"
        max_at_once = 3
        [inplace]
        max_turn = "5m"
        """,
        where="test",
    )
    result = Reload.of(before, after)
    assert result.effective == ("agent.admins", "suspend.min_run", "inplace.max_turn")
    assert result.pending == ("agent.period", "suspend.max_at_once")
    assert str(result) == (
        "in effect: agent.admins, suspend.min_run, inplace.max_turn; after a restart: agent.period, suspend.max_at_once"
    )
    assert (result.config.suspend.min_run, result.config.agent.admins) == ("1h", ("alice",))
    assert (result.config.suspend.max_at_once, result.config.agent.period) == (1, "5s")
    again = Reload.of(result.config, after)
    assert (again.effective, again.pending) == ((), result.pending)
    assert str(again) == "in effect: nothing; after a restart: agent.period, suspend.max_at_once"
    assert str(Reload.of(after, after)) == "nothing has changed"


@pytest.mark.parametrize("error", [ConfigError("a.toml: suspend.min_run:\nis not a span"), OSError(5, "I/O error")])
def test_invalid_configuration_keeps_the_previous_one(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    """One line states the error; nothing is applied."""
    before, applied = Config(), list[Config]()

    def read() -> Config:
        raise error

    assert reload(before, read, applied.append) is before
    assert applied == []
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("the configuration is not reloaded, the previous one stays in effect: ")
    assert "\n" not in record.getMessage()


def test_configuration_that_cannot_be_applied_keeps_the_previous_one(caplog: pytest.LogCaptureFixture) -> None:
    """A value that only its use shows to be invalid."""
    before = Config()

    def refuse(config: Config) -> None:
        raise AffinodeError("cannot be used")

    assert reload(before, lambda: replace(before, agent=replace(before.agent, admins=("alice",))), refuse) is before
    assert caplog.messages == ["the configuration is not reloaded, the previous one stays in effect: cannot be used"]


def test_running_agent_takes_over_policy_and_administrators(
    node: Node1, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a new agent; the sampling interval stays until a restart."""
    alice = Caller(4242, "alice", local=True)
    assert not node.daemon.admins(alice)
    changed = config_of(tmp_path, agent='admins = ["alice"]', suspend="dry_run = true")
    changed = replace(changed, agent=replace(changed.agent, period="7s"))
    node.daemon._read_config = lambda: changed
    with caplog.at_level(logging.INFO):
        node.daemon.request_reload()
        wait_until("it is reloaded", lambda: node.daemon.loop.policy.dry_run)
        wait_until("it is logged", lambda: any("is reloaded" in text for text in caplog.messages))
    assert node.daemon.admins(alice)
    assert node.daemon.config.agent.period == "0.05s"
    assert [text for text in caplog.messages if "reloaded" in text] == [
        "the configuration is reloaded: in effect: agent.admins, suspend.dry_run; after a restart: agent.period"
    ]


def test_window_of_a_job_starts_again_if_its_rule_has_changed(node: Node1, tmp_path: Path) -> None:
    """A higher floor must not make time idle that was counted as busy."""
    watched(node, option="window=3600")
    before = wait_until("it is sampled", lambda: node.daemon.loop.states.get(7))
    assert before is not None
    detector = before.detector
    loop, config = node.daemon.loop, node.daemon.config
    loop.reconfigure(config.agent, loop.policy)
    assert loop.states[7].detector is detector
    loop.reconfigure(replace(config.agent, min_signals=3), loop.policy)
    assert loop.states[7].detector is not detector
    assert loop.states[7].detector.rule.min_signals == 3
