"""Prolog and epilog, and the imports of the daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import agent, config_of

from slurm_affinode.agent import hooks
from slurm_affinode.base import config, node_config

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "2001", "SLURM_JOB_GPUS": "0,1"}


def settings_file(directory: Path, text: str) -> Path:
    path = directory / "config.toml"
    path.write_text(text)
    return path


def test_prolog_and_epilog_notify_agent(tmp_path: Path) -> None:
    """They report the job, its user, and its GPUs."""
    with agent(config_of(tmp_path)) as node:
        path = settings_file(tmp_path, f'[agent]\nrun_dir = "{node.run_dir}"\n')
        assert hooks.main("prolog", path, JOB) == 0
        assert node.daemon.service.gpu_indices == {7: (0, 1)}
        assert hooks.main("epilog", path, JOB) == 0
        assert node.daemon.service.gpu_indices == {}


def test_gpus_from_prolog_survive_restart_of_agent(tmp_path: Path) -> None:
    """There is no other source of the GPUs of a job that waits to start. An invalid file is ignored."""
    config = config_of(tmp_path)
    for jobs in ({"7": "0,1", "8": "1"}, {}):
        with agent(config) as node:
            path = settings_file(tmp_path, f'[agent]\nrun_dir = "{node.run_dir}"\n')
            for job, gpus in jobs.items():
                assert hooks.main("prolog", path, JOB | {"SLURM_JOB_ID": job, "SLURM_JOB_GPUS": gpus}) == 0
            assert node.daemon.service.gpu_indices == {7: (0, 1), 8: (1,)}
    assert hooks.main("epilog", path, JOB) == 0  # no agent receives it
    for text, known in (('{"7": 1}', {}), ("[1]", {}), ('{"7": [1, 0]}', {7: (1, 0)})):
        (node.run_dir / "gpus.json").write_text(text)
        with agent(config) as node:
            assert node.daemon.service.gpu_indices == known


def test_job_mapping_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No agent is required: dcgm-exporter needs the mapping."""
    path = settings_file(tmp_path, f'[agent]\nrun_dir = "{tmp_path}"\njob_map = "{tmp_path}/map"\n')
    assert hooks.main("prolog", path, JOB) == 0
    assert (tmp_path / "map" / "1").read_text() == "7\n"
    assert "no agent runs on this node" in capsys.readouterr().err
    hooks.main("prolog", path, JOB | {"SLURM_JOB_ID": "8"})
    assert hooks.main("epilog", path, JOB) == 0
    assert (tmp_path / "map" / "1").read_text() == "8\n"
    # As set by slurmd for a job that was canceled while its prolog ran.
    assert hooks.main("epilog", path, JOB | {"SLURM_JOB_ID": "8", "SLURM_JOB_GPUS": ""}) == 0
    assert list((tmp_path / "map").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        ("", {}, "SLURM_JOB_ID and SLURM_JOB_UID are not set"),
        ("", {"SLURM_JOB_ID": "7; reboot", "SLURM_JOB_UID": "0"}, "are not set"),
        ("[agent\n", JOB, "config.toml"),
        ("agent = 1\n[suspend]\n", JOB, "no agent runs"),
        ("[agent]\njob_map = 5\n", JOB | {"SLURM_JOB_GPUS": "../x"}, "is not the index of a GPU"),
    ],
)
def test_errors_do_not_fail_node(  # noqa: PLR0917
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, env: dict[str, str],
    message: str,
) -> None:  # fmt: skip
    """Errors are reported, and the job starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hooks, "RUN_DIR", str(tmp_path / "nowhere"))
    assert hooks.main("prolog", settings_file(tmp_path, text), env) == 0
    assert message in capsys.readouterr().err


def test_strict_hooks_fail_without_agent(tmp_path: Path) -> None:
    """Such a site permits no jobs on a node without an agent."""
    path = settings_file(tmp_path, f'[agent]\nrun_dir = "{tmp_path}"\nstrict_hooks = true\n')
    assert hooks.main("prolog", path, JOB) == 1
    assert hooks.main("epilog", tmp_path / "absent.toml", JOB) == 0


def test_defaults_are_those_of_the_configuration() -> None:
    """They are defined twice to keep the imports small."""
    assert Path(hooks.CONFIG) == config.DEFAULT_PATH
    assert config.ENV_CONFIG == hooks.ENV_CONFIG
    assert Path(hooks.RUN_DIR) == node_config.AgentConfig().run_dir


HEAVY = {"polars", "pandas", "pyarrow", "sqlalchemy", "numpy", "rich", "jinja2", "prometheus_client", "httpx"}


def imported(code: str) -> set[str]:
    """Return the packages imported by a program."""
    program = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=240, check=True)
    return set(done.stdout.split())


def test_daemon_imports_nothing_heavy() -> None:
    """It runs permanently on every node."""
    code = (
        "import slurm_affinode.cli.main, slurm_affinode.cli.agent, slurm_affinode.agent.daemon\n"
        "import slurm_affinode.agent.composition, slurm_affinode.gpu.nvml, slurm_affinode.slurm.client\n"
    )
    assert not imported(code) & HEAVY


def test_hooks_import_little() -> None:
    """They run for every job."""
    code = "import slurm_affinode.cli.entry, slurm_affinode.agent.hooks"
    assert not imported(code) & (HEAVY | {"click", "dataclasses", "asyncio", "concurrent", "logging", "tomllib"})


def test_leftovers_on_instances_without_index_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG instances may have such names; for a job without GPUs there is no search."""
    requests: list[dict[str, Any]] = []
    monkeypatch.setattr(hooks, "ask_local", lambda _, request, **__: requests.append(dict(request)) or {})
    for names in ("MIG-1a2b,MIG-3c4d", "0,1", ""):
        assert hooks.run("epilog", {}, JOB | {"SLURM_JOB_GPUS": names}) == []
    assert [action["gpus"] for action in requests if action["verb"] == "leftovers"] == [[], [0, 1]]
    assert [action.get("gpus") for action in requests if action["verb"] == "epilog"] == [None, [0, 1], None]
