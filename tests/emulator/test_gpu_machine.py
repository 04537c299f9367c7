"""How the tests for machines with a GPU (tests/gpu) judge a machine: skip, fail, or leave it alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pynvml
import pytest
from gpu import machine

from slurm_affinode.model.gpu import Device

REPOSITORY = Path(__file__).resolve().parents[2]


def test_device_without_working_driver_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a device is not broken."""
    monkeypatch.setattr(machine, "_DEVICE", tmp_path / "nvidiactl")
    findings = machine.find()
    if isinstance(findings, machine.Machine):
        pytest.skip("there is a GPU here")
    assert not findings.broken
    (tmp_path / "nvidiactl").touch()
    findings = machine.find()
    assert isinstance(findings, machine.Missing)
    assert findings.broken
    assert "no NVIDIA driver answers" in findings.why


def test_gpu_in_exclusive_mode_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on clusters with MPS: a second process would fail with the driver's "unavailable" error."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda item: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", {"GPU-1": 3}.__getitem__)
    findings = machine.find()
    assert isinstance(findings, machine.Missing)
    assert not findings.broken
    assert "one process at a time" in findings.why
    assert "nvidia-smi -i 0 -c DEFAULT" in findings.why
    driver.close.assert_called_once()


def test_gpu_with_mig_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML lists only the GPU then, and CUDA none."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda item: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", lambda handle: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: [1, 1])
    findings = machine.find()
    assert isinstance(findings, machine.Missing)
    assert (findings.broken, "MIG is on" in findings.why) == (False, True)


@pytest.mark.parametrize(
    ("visible", "usable"),
    [(None, True), ("0", True), ("2, 0", True), ("GPU-1", True), ("GPU-12", True), ("GPU-123-x", False),
     ("3", False), ("GPU-9", False), ("", False), ("-1,0", False), ("10", False)],
)  # fmt: skip
def test_invisible_first_gpu_is_not_used(visible: str | None, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to someone else if CUDA_VISIBLE_DEVICES assigns the GPUs of a machine."""
    gpu = Device(uuid="GPU-123", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda item: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(machine, "_VISIBLE", visible)
    monkeypatch.setattr(machine, "torch_version", lambda: (None, machine.Missing("none")))
    findings = machine.find()
    assert isinstance(findings, machine.Machine) is usable
    assert usable or f"CUDA_VISIBLE_DEVICES={visible} leaves out" in findings.why  # type: ignore[union-attr]


def test_full_gpu_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts alone would not fit: each test would fail with the driver's "out of memory" error."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda item: 900.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    findings = machine.find()
    assert isinstance(findings, machine.Missing)
    assert (findings.broken, "900 MiB are free on the first GPU" in findings.why) == (False, True)


@pytest.mark.parametrize(("version", "usable"), [("570.158.01", False), ("575.57.08", True), ("580.95.05", True)])
def test_pytorch_is_skipped_on_old_driver(version: str, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs can be suspended with it."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: version, free_mib=lambda item: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(machine, "torch_version", lambda: ("2.11.0", None))
    findings = machine.find()
    assert isinstance(findings, machine.Machine)
    assert (findings.torch is not None) is usable
    assert usable or "issue 34" in findings.no_torch.why  # type: ignore[union-attr]


def test_invalid_size_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line and not skipped, as the size was set explicitly."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda item: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setenv("GPU_TEST_MIB", "10G")
    findings = machine.find()
    assert isinstance(findings, machine.Missing)
    assert (findings.broken, "'10G'" in findings.why) == (True, True)


_LONELY = """
import atexit, sys, time
from pathlib import Path
from gpu import protocol
protocol._ORPHAN_POLLS = 3
atexit.register(time.sleep, 600)
protocol.serve(Path(sys.argv[1]), {})
"""


def test_orphaned_program_exits_without_exit_handlers(tmp_path: Path) -> None:
    """Exit handlers of libraries call the driver, which blocks in a locked process until it is unlocked."""
    env = {**os.environ, "GPU_TEST_PARENT": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    ran = subprocess.run([sys.executable, "-c", _LONELY, str(tmp_path)], check=False, env=env, timeout=240)
    assert ran.returncode == 1


def test_pytorch_without_gpu_is_broken_but_missing_pytorch_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result contains the error message of PyTorch."""
    monkeypatch.setenv("GPU_TEST_PYTHONPATH", str(tmp_path))
    version, missing = machine.torch_version()
    assert version is None
    assert missing is not None
    assert (missing.broken, "no PyTorch that sees a GPU: No module named 'torch'" in missing.why) == (False, True)
    (tmp_path / "torch").mkdir()
    torch = tmp_path / "torch" / "__init__.py"
    for cuda, broken in (("None", False), ("'13.2'", True)):
        torch.write_text(
            f"class version: cuda = {cuda}\n__version__ = '2.15'\nclass cuda:\n"
            "    is_available = staticmethod(lambda: False)\n"
            "    def init(): raise RuntimeError('no CUDA-capable device is detected')\n"
        )
        missing = machine.torch_version()[1]
        assert missing is not None
        assert missing.broken is broken
    assert "no CUDA-capable device is detected" in missing.why
