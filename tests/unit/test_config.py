"""The configuration file: precedence, and mistakes that are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode import config
from slurm_affinode.errors import ConfigError


def test_defaults_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no file at the default place, every key has its default."""
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "absent.toml")
    loaded = config.load(env={})
    assert loaded == config.Config()
    assert loaded.db_url == f"sqlite:///{loaded.state_dir / 'affinode.sqlite'}"


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    """The three sources of the state directory, weakest first."""
    file = tmp_path / "c.toml"
    file.write_text('[store]\nstate_dir = "/file"\n')
    assert config.load(file, env={}).state_dir == Path("/file")
    env = {config.ENV_STATE: "/env", config.ENV_DB: "sqlite:///env.db"}
    assert config.load(file, env=env).state_dir == Path("/env")
    loaded = config.load(file, env=env, state_dir=Path("/line"), db="sqlite:///line.db")
    assert (loaded.state_dir, loaded.db_url) == (Path("/line"), "sqlite:///line.db")


def test_environment_names_the_file(tmp_path: Path) -> None:
    """SLURM_AFFINODE_CONFIG names a file; one that is named must exist."""
    file = tmp_path / "c.toml"
    file.write_text('[cluster]\nname = "c1"\ntimezone = "Europe/Oslo"\n[nightly]\ngpu_paths = ["/a", "/b/*.csv"]\n')
    loaded = config.load(env={config.ENV_CONFIG: str(file)})
    assert loaded.source == file
    assert loaded.cluster == config.ClusterConfig(name="c1", timezone="Europe/Oslo")
    assert loaded.nightly.gpu_paths == ("/a", "/b/*.csv")
    with pytest.raises(ConfigError, match="no such file"):
        config.load(env={config.ENV_CONFIG: str(tmp_path / "none.toml")})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[stor]\n", r"c\.toml: unknown key stor"),
        ("[store]\ndbb = 'x'\n", r"unknown key store\.dbb"),
        ("store = 3\n", "store: a table is needed"),
        ("[idle]\nidle_pct = 'x'\n", r"idle\.idle_pct: 'x' is not a number"),
        ("[idle]\nidle_pct = true\n", r"idle\.idle_pct: True is not a number"),
        ("[idle]\nidle_pct = 9\n", "idle_pct <= low_pct"),
        ("[idle]\nmax_gap_steps = 0.5\n", "max_gap_steps: 0.5 is below 1"),
        ("[nightly]\ngpu_paths = 'x'\n", r"nightly\.gpu_paths: 'x' is not a list of strings"),
        ("[gpu_history]\ncolumns = {a = 1}\n", r"gpu_history\.columns: .* is not a table of strings"),
        ("[store]\nstate_dir = 1\n", r"store\.state_dir: 1 is not a path"),
        ("[nightly]\nkeep_samples = '999999d'\n", r"nightly\.keep_samples: 999999d is more than 100 years"),
        ("[zombies]\nlook_back = '99999999999d'\n", r"zombies\.look_back: 99999999999d is more than 100 years"),
        ("[zombies.nodes]\na = {cores = 8, gpus = 4}\n", r"c\.toml: zombies\.nodes\.a: memory_gib is missing"),
        ("[store\n", r"c\.toml:1: not TOML: .*\[store"),
    ],
)
def test_a_mistake_names_file_and_key(text: str, said: str) -> None:
    """A typing mistake is never silently a default."""
    with pytest.raises(ConfigError, match=said):
        config.parse(text, where="c.toml")


def test_what_is_kept_for_ever_is_kept_for_a_hundred_years() -> None:
    """The longest span that the hint names is taken."""
    assert config.parse("[nightly]\nkeep_jobs = '36500d'\n", where="c.toml").nightly.keep_jobs == "36500d"


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    """A directory in place of the file is said to be that."""
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(tmp_path, env={})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        config.load(binary, env={})


def test_state_directory_of_a_user_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root the state lies below the user's own state directory."""
    monkeypatch.setattr(config.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/.state")
    assert config.Config().state_dir == Path("/home/u/.state/slurm-affinode")
    assert config.Config().history_dir == Path("/home/u/.state/slurm-affinode/history")
