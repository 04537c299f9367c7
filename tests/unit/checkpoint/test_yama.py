"""The setting of Yama's ``ptrace_scope``, read from files as the kernel provides them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.checkpoint import yama
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.yama import PtraceVerdict
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED
from slurm_affinode.pipeline.doctor import tracing


@pytest.fixture(params=["0", "1", "2", "3"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    path = tmp_path / "ptrace_scope"
    path.write_text(f"{request.param}\n")
    return path, int(request.param)


def test_scope_is_read(setting: tuple[Path, int]) -> None:
    path, value = setting
    assert yama.scope(path) == value
    assert f"is {value}:" in yama.describe(value)


@pytest.mark.parametrize("text", ["", "4\n", "-1\n", "1 2\n", "one\n", "٣\n", "\udcff"])
def test_unknown_scope_counts_as_no_yama(tmp_path: Path, text: str) -> None:
    """An unknown value is treated as no protection."""
    path = tmp_path / "ptrace_scope"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert yama.scope(path) is None
    assert yama.scope(tmp_path / "missing") is None
    assert yama.scope(tmp_path) is None
    assert yama.judge(None) is not PtraceVerdict.SOUND


def test_doctor_and_agent_agree(setting: tuple[Path, int]) -> None:
    """Both use the same decision, and the message has a remedy."""
    path, value = setting
    result = tracing(path)
    if value:
        assert result.status == OK
        assert yama.check(path) is None
        return
    assert result.status in (SKIPPED, PROBLEM)
    assert result.hint is not None
    assert "sysctl.d" in result.hint
    assert "kernel.yama.ptrace_scope=1" in (yama.check(path) or "")


def test_refused_scope_stops_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yama, "judge", lambda scope: PtraceVerdict.REFUSED)
    with pytest.raises(CheckpointError, match="the kernel has no Yama") as raised:
        yama.check(tmp_path / "missing")
    assert "CONFIG_SECURITY_YAMA" in str(raised.value.hint)
    assert tracing(tmp_path / "missing").status == PROBLEM
