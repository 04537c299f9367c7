"""Units and crontabs: the search path of the program that writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base.config import Config
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.pipeline import timer_files


def test_timer_finds_the_program_that_installed_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without its directory on the path, the unit would fail with "No such file" at each start."""
    monkeypatch.setattr(timer_files.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(timer_files.sys, "executable", str(tmp_path / "python"))
    assert timer_files.search_path(Config(), str, on_this_host=True) == {}
    (tmp_path / "slurm-affinode").touch()
    [(old, new)] = timer_files.search_path(Config(), str, on_this_host=True).items()
    assert new == old.replace("=", f"={tmp_path}:")
    for name in ("slurm-affinode", "slurm-affinode-zombies"):
        assert old in (asset_dir("reports") / "cron.d" / name).read_text()
    monkeypatch.setattr(timer_files.shutil, "which", lambda name, path: "/usr/local/bin/slurm-affinode")
    assert timer_files.search_path(Config(), str, on_this_host=True) == {}
