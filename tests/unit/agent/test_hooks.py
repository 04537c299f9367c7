"""Prolog and epilog, and what the daemon does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import agent, config_of

from slurm_affinode import config, nodeconfig
from slurm_affinode.agent import hooks

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "2001", "SLURM_JOB_GPUS": "0,1"}


def settings_file(directory: Path, text: str) -> Path:
    path = directory / "config.toml"
    path.write_text(text)
    return path


def test_prolog_and_epilog_tell_the_agent(tmp_path: Path) -> None:
    """Which job, whose, and which GPUs."""
    with agent(config_of(tmp_path)) as node:
        path = settings_file(tmp_path, f'[agent]\nrun_dir = "{node.run_dir}"\n')
        assert hooks.main("prolog", path, JOB) == 0
        assert node.daemon.service.gpu_indices == {7: (0, 1)}
        assert hooks.main("epilog", path, JOB) == 0
        assert node.daemon.service.gpu_indices == {}


def test_what_prologs_have_told_is_known_to_the_next_agent(tmp_path: Path) -> None:
    """Of a job that waits to start nobody else says which GPUs it has. A file that is not ours is as none."""
    config = config_of(tmp_path)
    for jobs in ({"7": "0,1", "8": "1"}, {}):
        with agent(config) as node:
            path = settings_file(tmp_path, f'[agent]\nrun_dir = "{node.run_dir}"\n')
            for job, gpus in jobs.items():
                assert hooks.main("prolog", path, JOB | {"SLURM_JOB_ID": job, "SLURM_JOB_GPUS": gpus}) == 0
            assert node.daemon.service.gpu_indices == {7: (0, 1), 8: (1,)}
    assert hooks.main("epilog", path, JOB) == 0  # nobody hears of that
    for text, known in (('{"7": 1}', {}), ("[1]", {}), ('{"7": [1, 0]}', {7: (1, 0)})):
        (node.run_dir / "gpus.json").write_text(text)
        with agent(config) as node:
            assert node.daemon.service.gpu_indices == known


def test_job_mapping_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also while no agent runs: dcgm-exporter needs it."""
    path = settings_file(tmp_path, f'[agent]\nrun_dir = "{tmp_path}"\njob_map = "{tmp_path}/map"\n')
    assert hooks.main("prolog", path, JOB) == 0
    assert (tmp_path / "map" / "1").read_text() == "7\n"
    assert "no agent runs on this node" in capsys.readouterr().err
    hooks.main("prolog", path, JOB | {"SLURM_JOB_ID": "8"})
    assert hooks.main("epilog", path, JOB) == 0
    assert (tmp_path / "map" / "1").read_text() == "8\n"
    # As slurmd tells it of a job that was cancelled while its prolog ran.
    assert hooks.main("epilog", path, JOB | {"SLURM_JOB_ID": "8", "SLURM_JOB_GPUS": ""}) == 0
    assert list((tmp_path / "map").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        ("", {}, "SLURM_JOB_ID and SLURM_JOB_UID are not set"),
        ("", {"SLURM_JOB_ID": "7; reboot", "SLURM_JOB_UID": "0"}, "are not set"),
        ("[agent\n", JOB, "config.toml"),
        ("agent = 1\n[suspend]\n", JOB, "no agent runs"),
        ("[agent]\njob_map = 5\n", JOB | {"SLURM_JOB_GPUS": "../x"}, "no index of a GPU"),
    ],
)
def test_node_is_never_failed(  # noqa: PLR0917
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, env: dict[str, str],
    said: str,
) -> None:  # fmt: skip
    """Whatever is wrong is said, and the job starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hooks, "RUN_DIR", str(tmp_path / "nowhere"))
    assert hooks.main("prolog", settings_file(tmp_path, text), env) == 0
    assert said in capsys.readouterr().err


def test_strict_site_is_told_by_the_status(tmp_path: Path) -> None:
    """Where a site wants no job on a node without an agent."""
    path = settings_file(tmp_path, f'[agent]\nrun_dir = "{tmp_path}"\nstrict_hooks = true\n')
    assert hooks.main("prolog", path, JOB) == 1
    assert hooks.main("epilog", tmp_path / "absent.toml", JOB) == 0


def test_defaults_are_those_of_the_configuration() -> None:
    """They are written down twice so that little has to be imported."""
    assert Path(hooks.CONFIG) == config.DEFAULT_PATH
    assert config.ENV_CONFIG == hooks.ENV_CONFIG
    assert Path(hooks.RUN_DIR) == nodeconfig.AgentConfig().run_dir


HEAVY = {"polars", "pandas", "pyarrow", "sqlalchemy", "numpy", "rich", "jinja2", "prometheus_client"}


def imported(code: str) -> set[str]:
    """The packages that a program has imported."""
    program = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_daemon_imports_nothing_heavy() -> None:
    """It runs on every node, all the time."""
    code = (
        "import slurm_affinode.cli.main, slurm_affinode.cli.agent, slurm_affinode.agent.daemon\n"
        "import slurm_affinode.agent.orchestration, slurm_affinode.gpu.nvml, slurm_affinode.slurm.backends\n"
    )
    assert not imported(code) & HEAVY


def test_hooks_import_next_to_nothing() -> None:
    """They run for every job."""
    code = "import slurm_affinode.cli.entry, slurm_affinode.agent.hooks"
    assert not imported(code) & (HEAVY | {"click", "dataclasses", "asyncio", "concurrent", "logging", "tomllib"})


def test_what_was_left_on_instances_without_numbers_is_looked_for_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MIG instances may be called; of a job without GPUs nothing is."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(hooks, "ask_local", lambda _, request, **__: asked.append(dict(request)) or {})
    for names in ("MIG-1a2b,MIG-3c4d", "0,1", ""):
        assert hooks.run("epilog", {}, JOB | {"SLURM_JOB_GPUS": names}) == []
    assert [one["gpus"] for one in asked if one["verb"] == "leftovers"] == [[], [0, 1]]
    assert [one.get("gpus") for one in asked if one["verb"] == "epilog"] == [None, [0, 1], None]
