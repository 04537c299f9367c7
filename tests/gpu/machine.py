"""The machine that the tests run on: its GPUs, its driver, and how much memory a test may take of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_affinode.checkpoint.criu import Criu
from slurm_affinode.checkpoint.facts import memory_facts
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.gpu import Device

# NVML counts GPUs by their PCI address; CUDA shall too, and show all of them.
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ.pop("CUDA_VISIBLE_DEVICES", None)

MIB = 1 << 20
COMMAND = "make test-gpu"
EMULATED_MIB = 48
LARGEST_MIB = 40 * 1024
"""Of one test; ``GPU_TEST_MIB`` sets another size."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is."""

    driver: str
    gpus: tuple[Device, ...]
    emulated: bool
    """The driver is the emulated one of ``containers/gpu-emulator``: nothing here is true of hardware."""
    mib: int
    """GPU memory that the large process of a test takes."""
    host_available_mib: int
    torch: str | None
    """Version of PyTorch, where it sees a GPU."""
    criu: str | None
    """Path of a CRIU that can be used, as root."""
    root: bool

    def facts(self) -> dict[str, Any]:
        """For the results."""
        shown = asdict(self)
        shown["python"] = sys.version.split()[0]
        shown["kernel"] = os.uname().release
        return shown


def emulated() -> bool:
    """Whether the library that stands for the driver in this process is the emulated one."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return "libgpu-emulator.so" in Path("/proc/self/maps").read_text(encoding="utf-8")


def find() -> Machine | str:
    """The machine, or why there is none to test on."""
    driver = NvmlDriver()
    try:
        shown = driver.devices()
        devices = [one for one in shown if one.mig is None]
        version = driver.version()
        free = [driver.read(one).fb_free_mib or 0.0 for one in devices]
    except GpuError as error:
        return f"no NVIDIA driver answers here ({error}); on a machine with a GPU: {COMMAND}"
    finally:
        driver.close()
    if not devices:
        return f"the driver shows no GPU; on a machine with a GPU: {COMMAND}"
    if any(one.mig is not None and one.uuid == devices[0].uuid for one in shown):
        return f"MIG is on, and MIG instances cannot be checkpointed; on a GPU without MIG: {COMMAND}"
    memory = memory_facts(os.getpid())
    room = memory.available if memory.headroom is None else min(memory.available, memory.headroom)
    is_emulated = emulated()
    largest = EMULATED_MIB if is_emulated else LARGEST_MIB
    # While it is checkpointed its memory is in host memory, and an image of it may be in the page cache besides.
    mib = min(int(os.environ.get("GPU_TEST_MIB", largest)), int(free[0] * 0.6), int(room / MIB * 0.4))
    return Machine(
        version, tuple(devices), is_emulated, max(8, mib), room // MIB, torch_version(), criu_path(), os.geteuid() == 0
    )


def torch_version() -> str | None:
    """Of the PyTorch of ``GPU_TEST_PYTHON`` (this Python), where it sees a GPU."""
    code = "import torch; assert torch.cuda.is_available(); print(torch.__version__)"
    try:
        done = subprocess.run(
            [torch_python(), "-c", code], check=False, env=torch_env(), capture_output=True, text=True, timeout=180
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def torch_python() -> str:
    """The Python that has PyTorch."""
    return os.environ.get("GPU_TEST_PYTHON", sys.executable)


def torch_env() -> dict[str, str]:
    """Its environment: without what was put on the path for these tests, where somebody says what it was before."""
    env = dict(os.environ)
    if "GPU_TEST_PYTHONPATH" in env:
        env["PYTHONPATH"] = env["GPU_TEST_PYTHONPATH"]
    return env


def criu_path() -> str | None:
    """Named by ``CRIU``, or on the path; 4.1 or newer."""
    found = shutil.which(os.environ.get("CRIU", "criu"))
    if found is None:
        return None
    path = str(Path(found).resolve())
    try:
        Criu(program=path).check()
    except CheckpointError:
        return None
    return path
