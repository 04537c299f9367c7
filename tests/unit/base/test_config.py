"""The configuration file: precedence, and mistakes reported with their key."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from slurm_affinode.base import config
from slurm_affinode.base.errors import ConfigError


def test_defaults_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the default file does not exist, every key has its default."""
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "absent.toml")
    loaded = config.load(env={})
    assert loaded == config.Config()
    assert loaded.db_url == f"sqlite:///{loaded.state_dir / 'affinode.sqlite'}"


def test_command_line_overrides_environment_and_file(tmp_path: Path) -> None:
    """The sources of the state directory, in ascending precedence."""
    file = tmp_path / "c.toml"
    file.write_text('[store]\nstate_dir = "/file"\n')
    assert config.load(file, env={}).state_dir == Path("/file")
    env = {config.ENV_STATE: "/env", config.ENV_DB: "sqlite:///env.db"}
    assert config.load(file, env=env).state_dir == Path("/env")
    loaded = config.load(file, env=env, state_dir=Path("/line"), db="sqlite:///line.db")
    assert (loaded.state_dir, loaded.db_url) == (Path("/line"), "sqlite:///line.db")


def test_environment_names_the_file(tmp_path: Path) -> None:
    """A file named by SLURM_AFFINODE_CONFIG must exist."""
    file = tmp_path / "c.toml"
    file.write_text('[cluster]\nname = "c1"\ntimezone = "Europe/Oslo"\n[nightly]\ngpu_paths = ["/a", "/b/*.csv"]\n')
    loaded = config.load(env={config.ENV_CONFIG: str(file)})
    assert loaded.source == file
    assert loaded.cluster == config.ClusterConfig(name="c1", timezone="Europe/Oslo")
    assert loaded.nightly.gpu_paths == ("/a", "/b/*.csv")
    with pytest.raises(ConfigError, match="no such file"):
        config.load(env={config.ENV_CONFIG: str(tmp_path / "none.toml")})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[stor]\n", r"c\.toml:1: stor: unknown key"),
        ("[store]\ndbb = 'x'\n", r"c\.toml:2: store\.dbb: unknown key"),
        ("store = 3\n", "store: a table is needed"),
        ("[idle]\nidle_pct = 'x'\n", r"idle\.idle_pct: 'x' is not a number"),
        ("[idle]\nidle_pct = true\n", r"idle\.idle_pct: True is not a number"),
        ("[idle]\nidle_pct = 9\n", "idle_pct <= low_pct"),
        ("[idle]\nmax_gap_steps = 0.5\n", "max_gap_steps: 0.5 is below 1"),
        ("[nightly]\ngpu_paths = 'x'\n", r"nightly\.gpu_paths: 'x' is not a list of strings"),
        ("[gpu_history]\ncolumns = {a = 1}\n", r"gpu_history\.columns\.a: 1 is not a string"),
        ("[store]\nstate_dir = 1\n", r"store\.state_dir: 1 is not a path"),
        ("[nightly]\nkeep_samples = '999999d'\n", r"nightly\.keep_samples: 999999d is more than 100 years"),
        ("[zombies]\nlook_back = '99999999999d'\n", r"zombies\.look_back: 99999999999d is more than 100 years"),
        ("[zombies.nodes]\na = {cores = 8, gpus = 4}\n", r"c\.toml:2: zombies\.nodes\.a: memory_gib is missing"),
        ("[zombies.nodes]\na = {cores = 0, gpus = 4, memory_gib = 1}\n", r"zombies\.nodes\.a\.cores: 0 is below 1"),
        ("[zombies.nodes]\na = {cores = 1, gpus = -4, memory_gib = 1}\n", r"zombies\.nodes\.a\.gpus: -4 is below 0"),
        ("[zombies.nodes]\na = {cores = 1, gpus = 4, memory_gib = 0}\n", r"a\.memory_gib: 0 is not above 0"),
        ("[zombies]\nexporter_port = 70000\n", r"zombies\.exporter_port: 70000 is not from 1 to 65535"),
        ("[zombies]\nexporter_url = 'n1:9400'\n", r"zombies\.exporter_url: 'n1:9400' is neither http nor https"),
        ("[report]\nworking_hours = '18:00-08:00'\n", r"report\.working_hours: '18:00-08:00' is not a part of a day"),
        ("[report]\nworking_days = ['Mon', 'Fry']\n", r"report\.working_days: 'Fry' is not a day"),
        ("[zombies]\nlook_back = '0s'\n", r"zombies\.look_back: 0s is not above 0"),
        ("[zombies.misfits]\ntime_share = 20\n", r"zombies\.misfits\.time_share: 20 is not from 0 to 1"),
        ("[zombies.misfits]\nsmall_util_pct = 150\n", r"misfits\.small_util_pct: 150 is not from 0 to 100"),
        ("[zombies.misfits]\ncores_per_gpu = 0\n", r"zombies\.misfits\.cores_per_gpu: 0 is not above 0"),
        ("[zombies.misfits]\nuser_top = 0\n", r"zombies\.misfits\.user_top: 0 is below 1"),
        ("[cluster]\nname = ''\n", r"c\.toml:2: cluster\.name: is empty"),
        ('[cluster]\nname = "a\\u001bb"\n', r"cluster\.name: 'a\\x1bb' has a character that cannot be printed"),
        ('[agent]\nadmins = ["a\\u0000"]\n', r"agent\.admins: 'a\\x00' has a character"),
        ('[prometheus]\nheaders = { "X Y" = "1" }\n', r"prometheus\.headers: 'X Y' is not the name of a header"),
        ('[prometheus]\nheaders = { "" = "1" }\n', r"prometheus\.headers: '' is not the name of a header"),
        ('[prometheus]\nheaders = { X = "1\\n2" }\n', r"prometheus\.headers\.X: '1\\n2' has a character"),
        ("[cluster]\ntimezone = 'Europe/Olso'\n", r"cluster\.timezone: 'Europe/Olso' is not a time zone"),
        ("[store]\nstate_dir = ' '\n", r"store\.state_dir: is empty"),
        ("[store]\nstate_dir = '~nobody-of-that-name/x'\n", r"store\.state_dir: ~nobody.*: Could not determine home"),
        ("[nightly]\nkeep_samples = '0d'\n", r"nightly\.keep_samples: 0d is less than 1d"),
        ("[nightly]\ngpu_paths = ['']\n", r"nightly\.gpu_paths: has an empty text in it"),
        ("[idle]\nmax_gap_steps = inf\n", r"idle\.max_gap_steps: inf is not a finite number"),
        (
            "[prometheus]\nurl = 'metrics:9090'\n",
            r"prometheus\.url: 'metrics:9090' is not the URL of a Prometheus server",
        ),
        ("[prometheus]\nurl = 'http://me:secret@m/'\n", r"prometheus\.url: credentials in the URL of m"),
        ("[store\n", r"c\.toml:1: not TOML: .*\[store"),
    ],
)
def test_mistake_is_reported_with_file_and_key(text: str, message: str) -> None:
    """A mistyped key never falls back to a default."""
    with pytest.raises(ConfigError, match=message):
        config.parse(text, where="c.toml")


def test_longest_duration_is_a_hundred_years() -> None:
    """The hint names it."""
    assert config.parse("[nightly]\nkeep_jobs = '36500d'\n", where="c.toml").nightly.keep_jobs == "36500d"


def test_unreadable_file_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(tmp_path, env={})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        config.load(binary, env={})


def test_state_directory_without_root_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/.state")
    assert config.Config().state_dir == Path("/home/u/.state/slurm-affinode")
    assert config.Config().history_dir == Path("/home/u/.state/slurm-affinode/history")


def test_home_directory_is_expanded() -> None:
    """No shell expands ``~`` in a file that a timer uses, and a directory of that name would be wrong."""
    assert config.parse("[store]\nstate_dir = '~/state'\n", where="c.toml").state_dir == Path.home() / "state"


def test_pipe_is_read_and_times_out_without_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--config <(...)`` works; a forgotten pipe does not block a timer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(config, "_PIPE_S", 0.05)
    with pytest.raises(ConfigError, match="pipe: a pipe without a writer"):
        config.load(pipe, env={})
    monkeypatch.setattr(config, "_PIPE_S", 30.0)
    writer = threading.Thread(target=pipe.write_text, args=("[cluster]\nname = 'c9'\n",))
    writer.start()
    assert config.load(pipe, env={}).cluster.name == "c9"
    writer.join()


def test_endless_file_is_refused() -> None:
    """A device is not read until memory is exhausted."""
    with pytest.raises(ConfigError, match="/dev/zero: is larger than 1 MiB"):
        config.load(Path("/dev/zero"), env={})


def test_world_writable_file_is_reported(tmp_path: Path) -> None:
    """It names programs that root runs; so is a file in a world-writable directory, where it can be replaced."""
    file = tmp_path / "c.toml"
    file.write_text("")
    file.chmod(0o644)
    assert config.exposed(file) is None
    file.chmod(0o666)
    assert config.exposed(file) == f"{file}: everybody may write to it: chmod o-w {file}"
    file.chmod(0o644)
    tmp_path.chmod(0o777)
    assert config.exposed(file) == f"{file}: everybody may replace it: chmod o-w {tmp_path}"
    tmp_path.chmod(0o1777)
    assert config.exposed(file) is None


def test_slurm_bin_dir_is_an_absolute_path() -> None:
    """Root searches it, so it must not depend on the working directory."""
    assert config.parse('[slurm]\nbin_dir = "/opt/slurm/bin"\n', where="f").slurm.bin_dir == Path("/opt/slurm/bin")
    for wrong in ("bin", "/a:/b"):
        with pytest.raises(ConfigError, match=r"slurm\.bin_dir"):
            config.parse(f'[slurm]\nbin_dir = "{wrong}"\n', where="f")
