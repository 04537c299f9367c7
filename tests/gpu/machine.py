"""The machine that runs the tests: its GPUs, its driver, and how much memory a test may use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.cuda.features import major_of
from slurm_affinode.checkpoint.inspection import memory_facts
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.gpu import Device

# NVML orders GPUs by PCI address; make CUDA do the same and show all of them. Keep no cache in the home directory.
os.environ.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_CACHE_DISABLE="1")
# MPS cannot be checkpointed. Without its daemon, programs use the GPU directly; the default path is in /tmp.
os.environ["CUDA_MPS_PIPE_DIRECTORY"] = "/nonexistent"
_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
"""The caller's setting."""
# Settings of a site for its own programs: synchronous launches, other allocators for PyTorch.
for _name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
    os.environ.pop(_name, None)

MIB = 1 << 20
T = TypeVar("T")
COMMAND = os.environ.get("GPU_TEST_COMMAND", "make test-gpu")
_DEVICE = Path("/dev/nvidiactl")
_HINT = "nvidia-smi has to work"
_TORCH_SINCE = 575
_SETTLES_S, _POLL_S = 5.0, 0.1
EMULATED_MIB = 48
LARGEST_MIB = 40 * 1024
"""Per test; ``GPU_TEST_MIB`` sets another size."""
LEAST_MIB = 4 * 1024
"""Required free memory on GPU and host: the contexts of four programs take that much, whatever else they allocate."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a test needs and this machine does not have."""

    why: str
    """One line."""
    broken: bool = False
    """Whether it exists but does not work: tests that need it fail instead of being skipped."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of the machine."""

    driver: str
    gpus: tuple[Device, ...]
    emulated: bool
    """The driver is the emulated one of ``containers/gpu-emulator``: results do not apply to hardware."""
    mib: int
    """GPU memory that the large process of a test allocates."""
    host_available_mib: int
    torch: str | None
    """Version of PyTorch, if it finds a GPU."""
    no_torch: Missing | None
    """Why PyTorch cannot be used."""
    criu: str | None
    """Path of a usable CRIU, for root."""
    no_criu: Missing | None
    root: bool

    @property
    def besides_mib(self) -> int:
        """Image size beyond GPU memory: the program, and the driver's data in it."""
        return 64 if self.emulated else 2048

    def facts(self) -> dict[str, Any]:
        """Return the properties for the results."""
        shown = asdict(self)
        shown["criu"] = None if self.criu is None else Path(self.criu).name
        shown["python"] = sys.version.split()[0]
        shown["kernel"] = os.uname().release
        return shown


def settled(read: Callable[[], T]) -> T:
    """Poll until two results in a row are equal: the driver clears freed memory before it counts it as free."""
    deadline = time.monotonic() + _SETTLES_S
    result = read()
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before, result = result, read()
        if result == before:
            break
    return result


def emulated() -> bool:
    """Return whether the driver library of this process is the emulated one."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return "libgpu-emulator.so" in Path("/proc/self/maps").read_text(encoding="utf-8")


def find() -> Machine | Missing:
    """Return the machine, or why the tests cannot run on it."""
    driver = NvmlDriver()
    try:
        devices = [device for device in driver.devices() if device.mig is None]
        version = driver.version()
        free = [driver.free_mib(device) or 0.0 for device in devices]
        mode = modes(devices[0].uuid) if devices else ()
    except GpuError as error:
        if _DEVICE.exists():
            return Missing(
                f"{_DEVICE} is here, but no NVIDIA driver answers: {error} ({error.hint or _HINT})", broken=True
            )
        return Missing(f"no NVIDIA driver answers here ({error}); on a machine with a GPU: {COMMAND}")
    finally:
        driver.close()
    if not devices:
        return Missing(f"the driver shows no GPU; on a machine with a GPU: {COMMAND}")
    if not is_first(_VISIBLE, devices[0]):
        return Missing(
            f"CUDA_VISIBLE_DEVICES={_VISIBLE} leaves out the first GPU of this machine, and these tests use no other: "
            f"where that one is free, CUDA_VISIBLE_DEVICES=0 {COMMAND}"
        )
    if "mig" in mode:
        return Missing(f"MIG is on, and MIG instances cannot be checkpointed; on a GPU without MIG: {COMMAND}")
    if "exclusive" in mode:
        why = "its first GPU takes one process at a time (compute mode), and these tests have several"
        return Missing(f"{why}: nvidia-smi -i 0 -c DEFAULT, then {COMMAND}")
    memory = memory_facts(os.getpid())
    room = memory.available if memory.headroom is None else min(memory.available, memory.headroom)
    is_emulated = emulated()
    for left, where in ((free[0], "on the first GPU, which others use"), (room / MIB, "of the memory of this host")):
        if left < LEAST_MIB and not is_emulated:
            return Missing(f"{left:.0f} MiB are free {where}, and these tests need {LEAST_MIB}; later: {COMMAND}")
    largest = EMULATED_MIB if is_emulated else LARGEST_MIB
    # While checkpointed, the GPU memory is in host memory, and its image may be in the page cache as well.
    try:
        requested = int(os.environ.get("GPU_TEST_MIB", largest))
    except ValueError:
        return Missing(f"GPU_TEST_MIB is {os.environ['GPU_TEST_MIB']!r}, and not a number of MiB", broken=True)
    mib = min(requested, int(free[0] * 0.6), int(room / MIB * 0.4))
    torch, no_torch = torch_version()
    if torch is not None and (major_of(version) or 0) < _TORCH_SINCE:
        known = "its checkpoint refuses PyTorch, and 575.57.08 does not (NVIDIA/cuda-checkpoint, issue 34)"
        torch, no_torch = None, Missing(f"driver {version}: {known}")
    criu, no_criu = criu_path()
    return Machine(
        version, tuple(devices), is_emulated, max(8, mib), room // MIB, torch, no_torch, criu, no_criu,
        os.geteuid() == 0,
    )  # fmt: skip


def modes(uuid: str) -> tuple[str, ...]:
    """Return the modes that make a GPU unusable here; NVML must be initialized.

    ``mig``, also without an instance; ``exclusive``: one process at a time, or none.
    """
    result = []
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetComputeMode(pynvml.nvmlDeviceGetHandleByUUID(uuid)) != 0:
            result.append("exclusive")
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByUUID(uuid))[0] != 0:
            result.append("mig")
    return tuple(result)


def is_first(visible: str | None, first: Device) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` includes the first GPU; if not, the GPU may be in use by others.

    The variable ends at the first invalid entry. Source: CUDA programming guide, "CUDA environment variables".
    """
    if visible is None:
        return True
    for word in visible.split(","):
        name = word.strip()
        if name == "0" or (name.startswith("GPU-") and first.uuid.startswith(name)):
            return True
        if not name.isdecimal() and not name.startswith("GPU-"):
            return False
    return False


_TORCH = """
try:
    import torch
except ModuleNotFoundError as error:
    print("absent", error)
else:
    if torch.cuda.is_available():
        print("sees", torch.__version__)
    elif torch.version.cuda is None:
        print("absent", "PyTorch", torch.__version__, "is built without CUDA")
    else:
        torch.cuda.init()
"""


def torch_version() -> tuple[str | None, Missing | None]:
    """Return the version of PyTorch if it finds a GPU, or why it cannot be used.

    ``GPU_TEST_PYTHON`` names the Python that has it (default: this one).
    """
    hint = "GPU_TEST_PYTHON names a Python that has one"
    try:
        done = subprocess.run(
            [torch_python(), "-c", _TORCH], check=False, env=torch_env(), capture_output=True, text=True, timeout=180
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, Missing(f"{torch_python()} cannot be asked for PyTorch ({error}; {hint})", broken=True)
    word, _, rest = (done.stdout.strip().splitlines() or [""])[-1].partition(" ")
    if word == "sees":
        return rest, None
    if word == "absent":
        return None, Missing(f"no PyTorch that sees a GPU: {rest} ({hint})")
    message = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
    return None, Missing(f"the PyTorch of {torch_python()} sees no GPU: {message}", broken=True)


def torch_python() -> str:
    """Return the Python that has PyTorch."""
    return os.environ.get("GPU_TEST_PYTHON", sys.executable)


def torch_env() -> dict[str, str]:
    """Return its environment, with the caller's PYTHONPATH instead of the path for these tests, if known."""
    env = dict(os.environ)
    if "GPU_TEST_PYTHONPATH" in env:
        env["PYTHONPATH"] = env["GPU_TEST_PYTHONPATH"]
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise PyTorch would be recompiled for each program
    return env


def criu_path() -> tuple[str | None, Missing | None]:
    """Return the CRIU (4.1 or newer) that ``CRIU`` names or that is on the path, or why there is none."""
    named = os.environ.get("CRIU")
    result = shutil.which(named or "criu")
    if result is None:
        text = f"CRIU names {named}, which is no program" if named else "no criu is installed"
        return None, Missing(f"{text} (CRIU names one of 4.1 or newer; make gpu-bundle packs it)", bool(named))
    path = str(Path(result).resolve())
    try:
        Criu(program=path).check()
    except CheckpointError as error:
        return None, Missing(str(error), broken=bool(named))
    return path, None
