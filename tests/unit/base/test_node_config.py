"""The sections [agent] and [suspend] of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.config import parse
from slurm_affinode.base.errors import AffinodeError, ConfigError
from slurm_affinode.base.node_config import AgentConfig, LimitConfig, SuspendConfig, listen_address
from slurm_affinode.base.sizes import parse_size
from slurm_affinode.base.text import size


def test_empty_configuration_has_defaults() -> None:
    config = parse("", where="c.toml")
    assert config.agent.period == "5s"
    assert not config.suspend.dry_run


def test_sections_are_read() -> None:
    """Durations, numbers, lists, tables, and rules by name."""
    config = parse(
        """
        [agent]
        period = "2s"
        admins = ["admin"]
        min_signals = 1
        listen = "[::]:9999"
        run_dir = "/run/other"
        [agent.floors_pct]
        dram = 1
        [agent.host]
        cpu = 50
        [suspend]
        dry_run = true
        max_at_once = 3
        budget = "2T"
        exclude_users = ["bob"]
        [suspend.partitions.gpu]
        max_suspended = 4
        min_run = "1h"
        [suspend.users."a.b"]
        exclude = true
        """,
        where="c.toml",
    )
    assert config.agent.floors_pct == {"dram": 1.0}
    assert config.agent.run_dir == Path("/run/other")
    assert config.suspend.partitions == {"gpu": LimitConfig(4, "1h")}
    assert config.suspend.users["a.b"].exclude


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[agent]\nperiod = 'soon'\n", r"agent\.period: 'soon' is not a span"),
        ("[agent]\nperiod = '0s'\n", r"agent\.period: 0s is not above 0"),
        ("[agent]\nperod = '1s'\n", r"agent\.perod: unknown key"),
        ("[agent]\nmin_signals = 1.5\n", r"agent\.min_signals: 1\.5 is not a whole number"),
        ("[agent]\nmin_signals = true\n", r"agent\.min_signals: True is not a whole number"),
        ("[agent]\nmin_signals = 0\n", r"agent\.min_signals: 0 is not from 1 to 7"),
        ("[agent]\nmax_gap_periods = 0.5\n", r"agent\.max_gap_periods: 0\.5 is below 1"),
        ("[agent]\nmax_gap_periods = nan\n", r"agent\.max_gap_periods: nan is not a finite number"),
        ("[agent]\nlisten = 'here'\n", r"agent\.listen: 'here' is not HOST:PORT"),
        ("[agent]\nlisten = ':99999'\n", r"agent\.listen: ':99999' is not HOST:PORT"),
        ("[agent]\nrun_dir = 'run'\n", r"agent\.run_dir: run is not an absolute path"),
        ("[agent]\nadmins = 'admin'\n", r"agent\.admins: 'admin' is not a list of strings"),
        ("[agent.host]\ngpu = 1\n", r"agent\.host\.gpu: unknown key"),
        ("[agent.host]\ncpu = -1\n", r"agent\.host\.cpu: -1 is below 0"),
        ("[agent.host]\ncpu = 'x'\n", r"agent\.host\.cpu: 'x' is not a number"),
        ("[agent.floors_pct]\nutil = 1\n", r"agent\.floors_pct\.util: unknown key"),
        (
            "[suspend]\nlocal_directories = ['/tmp', '/./']\n",
            r"local_directories: '/\./' is not the absolute path of a dir",
        ),
        ("[suspend]\nbudget = 'much'\n", r"suspend\.budget: 'much' is not a size"),
        ("[suspend]\non_restore_failure = 'x'\n", r"suspend\.on_restore_failure: 'x' is not one of hold, fresh"),
        ("[suspend]\nmax_at_once = -1\n", r"suspend\.max_at_once: -1 is below 1"),
        ("[suspend]\nmax_at_once = 0\n", r"suspend\.max_at_once: 0 is below 1"),
        ("[agent.floors_pct]\ndram = 101\n", r"agent\.floors_pct\.dram: 101 is not from 0 to 100"),
        ("[agent.host]\ncpu = inf\n", r"agent\.host\.cpu: inf is not a finite number"),
        (f"[agent.host]\ncpu = {10**400}\n", r"agent\.host\.cpu: 10+ is not a finite number"),
        ("[suspend]\nexclude_users = ['']\n", r"suspend\.exclude_users: has an empty text in it"),
        ("[inplace]\npoll_ms = 70000\n", r"inplace\.poll_ms: 70000 is not from 10 to 60000"),
        ("[inplace]\nawake_limit_pct = 0\n", r"inplace\.awake_limit_pct: 0 is not above 0 and up to 100"),
        ("[suspend]\ndry_run = 'no'\n", r"suspend\.dry_run: 'no' is not true or false"),
        ("[suspend]\nshared_store = 'x'\n", r"suspend\.shared_store: x is not an absolute path"),
        ("[suspend.users.bob]\nmax = 1\n", r"suspend\.users\.bob\.max: unknown key"),
        ("[suspend.users.bob]\nmax_suspended = -1\n", r"suspend\.users\.bob\.max_suspended: -1 is below 0"),
        ("[suspend.users.bob]\nmin_run = 'x'\n", r"suspend\.users\.bob\.min_run: 'x' is not a span"),
        ("[suspend]\nservices = ['nss']\n", r"suspend\.services: 'nss' is not a full path"),
        ("[suspend]\nusers = {bob = 1}\n", r"suspend\.users\.bob: a table is needed"),
    ],
)
def test_mistake_is_reported_with_its_key(text: str, message: str) -> None:
    """The message has file and key."""
    with pytest.raises(ConfigError, match=message):
        parse(text, where="c.toml")


@pytest.mark.parametrize(("section", "kind"), [("agent", AgentConfig), ("suspend", SuspendConfig)])
def test_paths_are_absolute(section: str, kind: type[AgentConfig | SuspendConfig]) -> None:
    """The agent is root, and its working directory is not the administrator's."""
    paths = [name for name, declared in get_type_hints(kind).items() if "Path" in str(declared)]
    assert len(paths) > 2
    for name in paths:
        with pytest.raises(ConfigError, match=rf"{section}\.{name}: x is not an absolute path"):
            parse(f"[{section}]\n{name} = 'x'\n", where="c.toml")


def test_listen_addresses_are_parsed() -> None:
    assert listen_address("0.0.0.0:9403") == ("0.0.0.0", 9403)  # noqa: S104
    assert listen_address(":1") == ("0.0.0.0", 1)  # noqa: S104
    assert listen_address("[::1]:9403") == ("::1", 9403)
    assert listen_address("node.example.org:80") == ("node.example.org", 80)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("1k", 1024),
        ("1.5 GiB", 3 << 29),
        ("2T", 2 << 40),
        ("3 GB", 3 << 30),
        ("7B", 7),
        ("0", 0),
        ("0" * 39 + "1", 1),
    ],
)
def test_sizes_are_parsed(text: str, count: int) -> None:
    """Units are powers of 1024 in every notation."""
    assert parse_size(text) == count


@given(st.integers(0, 1 << 62))
def test_printed_size_can_be_parsed(count: int) -> None:
    """It is accurate to three digits."""
    assert abs(parse_size(size(count)) - count) <= max(1.0, count * 0.006)


@pytest.mark.parametrize("text", ["-1G", "", "1X", "9" * 41, "9" * 5000 + "P"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(AffinodeError, match="not a size"):
        parse_size(text)
