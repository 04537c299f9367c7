"""The stalled file system of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import stalling as module
from stalling import Stalling


def test_call_on_stalled_file_system_is_aborted(
    stalling: Callable[[Path], Stalling], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal ends such a call, so the test run would hang."""
    monkeypatch.setattr(module, "LONGEST_S", 1.0)
    file_system = stalling(tmp_path / "theirs")
    file_system.stall()
    with pytest.raises(OSError, match=r"not connected|abort"):
        (file_system.path / "file").read_bytes()
