"""What the tests for machines with a GPU (tests/gpu) make of a machine: skipped, failed, or left alone."""

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


def test_a_device_without_a_driver_that_answers_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without one is not."""
    monkeypatch.setattr(machine, "_DEVICE", tmp_path / "nvidiactl")
    found = machine.find()
    if isinstance(found, machine.Machine):
        pytest.skip("there is a GPU here")
    assert not found.broken
    (tmp_path / "nvidiactl").touch()
    found = machine.find()
    assert isinstance(found, machine.Missing)
    assert found.broken
    assert "no NVIDIA driver answers" in found.why


def test_a_gpu_that_takes_one_process_at_a_time_skips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As clusters with MPS have them: several processes on it would each fail, with the driver's "unavailable"."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda one: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", {"GPU-1": 3}.__getitem__)
    found = machine.find()
    assert isinstance(found, machine.Missing)
    assert not found.broken
    assert "one process at a time" in found.why
    assert "nvidia-smi -i 0 -c DEFAULT" in found.why
    driver.close.assert_called_once()


def test_a_gpu_with_mig_and_no_instance_skips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML lists the GPU alone then, and CUDA none."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda one: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", lambda handle: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: [1, 1])
    found = machine.find()
    assert isinstance(found, machine.Missing)
    assert (found.broken, "MIG is on" in found.why) == (False, True)


@pytest.mark.parametrize(
    ("visible", "ours"),
    [(None, True), ("0", True), ("2, 0", True), ("GPU-1", True), ("GPU-12", True), ("GPU-123-x", False),
     ("3", False), ("GPU-9", False), ("", False), ("-1,0", False), ("10", False)],
)  # fmt: skip
def test_a_first_gpu_that_was_not_asked_for_is_left_alone(
    visible: str | None, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another one's, where the GPUs of a machine are shared out by CUDA_VISIBLE_DEVICES."""
    gpu = Device(uuid="GPU-123", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda one: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(machine, "_VISIBLE", visible)
    monkeypatch.setattr(machine, "torch_version", lambda: (None, machine.Missing("none")))
    found = machine.find()
    assert isinstance(found, machine.Machine) is ours
    assert ours or f"CUDA_VISIBLE_DEVICES={visible} leaves out" in found.why  # type: ignore[union-attr]


def test_a_gpu_that_others_have_filled_skips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts alone would not fit: each test would fail, with the driver's "out of memory"."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda one: 900.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    found = machine.find()
    assert isinstance(found, machine.Missing)
    assert (found.broken, "900 MiB are free on the first GPU" in found.why) == (False, True)


@pytest.mark.parametrize(("version", "there"), [("570.158.01", False), ("575.57.08", True), ("580.95.05", True)])
def test_pytorch_is_not_asked_of_a_driver_that_refuses_it(
    version: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs can be suspended with it."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: version, free_mib=lambda one: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setattr(machine, "torch_version", lambda: ("2.11.0", None))
    found = machine.find()
    assert isinstance(found, machine.Machine)
    assert (found.torch is not None) is there
    assert there or "issue 34" in found.no_torch.why  # type: ignore[union-attr]


def test_a_size_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, and not skipped: somebody has asked for it."""
    gpu = Device(uuid="GPU-1", index=0)
    driver = Mock(devices=lambda: [gpu], version=lambda: "580.95.05", free_mib=lambda one: 80_000.0)
    monkeypatch.setattr(machine, "NvmlDriver", lambda: driver)
    monkeypatch.setenv("GPU_TEST_MIB", "10G")
    found = machine.find()
    assert isinstance(found, machine.Missing)
    assert (found.broken, "'10G'" in found.why) == (True, True)


_LONELY = """
import atexit, sys, time
from pathlib import Path
from gpu import protocol
protocol._ORPHAN_LOOKS = 3
atexit.register(time.sleep, 600)
protocol.serve(Path(sys.argv[1]), {})
"""


def test_a_program_whose_starter_is_gone_does_not_wait_for_an_unlock(tmp_path: Path) -> None:
    """What libraries do at the end calls the driver, which answers a locked process when somebody unlocks it."""
    env = {**os.environ, "GPU_TEST_PARENT": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    ran = subprocess.run([sys.executable, "-c", _LONELY, str(tmp_path)], check=False, env=env, timeout=60)
    assert ran.returncode == 1


def test_a_torch_that_sees_no_gpu_is_broken_and_none_at_all_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is told."""
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
