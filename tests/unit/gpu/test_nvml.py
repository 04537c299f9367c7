"""Features that the emulated driver does not have, on fake bindings: MIG, activity counters, drivers that refuse."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pynvml
import pytest

from slurm_affinode.gpu import nvml_errors
from slurm_affinode.gpu.interface import DriverMissing, GpuError, GpuLost, NotPermitted, NotSupported
from slurm_affinode.gpu.nvml import NvmlDriver

from .nvml_binding import MIB, Binding, Gpm, refusal


def test_activity_is_the_mean_since_the_last_reading():
    """It is None at first, then a share; NaN and missing counters are None; all samples are freed."""
    binding = Gpm()
    driver = NvmlDriver(binding, clock=count(0.0, 0.5).__next__)
    [device] = driver.devices()
    first, second = driver.read(device), driver.read(device)
    assert (first.engine_active, first.sm_active) == (None, None)
    assert (second.engine_active, second.sm_active, second.tensor_active, second.dram_active) == (0.98, 1.0, None, None)
    driver.close()
    assert (binding.freed, binding.shut) == (2, 1)


def test_second_reading_in_quick_succession_reuses_the_first():
    """Two jobs on a GPU are read in turn, with a query of free memory in between: both see the whole interval."""
    now = [0.0]
    binding = Gpm(nvmlDeviceGetMemoryInfo=SimpleNamespace(total=10 * MIB, used=2 * MIB, free=7 * MIB, reserved=MIB))
    driver = NvmlDriver(binding, clock=lambda: now[0])
    [device] = driver.devices()
    driver.read(device)
    now[0] = 5.0
    seen = driver.read(device).engine_active
    binding.nvmlGpmMetricsGet = pytest.fail
    now[0] = 5.001
    assert (seen, driver.read(device).engine_active, driver.free_mib(device)) == (0.98, 0.98, 7.0)


def test_gpu_without_values_is_listed():
    """Every field is None; XIDs that cannot be watched are not 0."""
    driver = NvmlDriver(Binding())
    [device] = driver.devices()
    reading = driver.read(device)
    assert {getattr(reading, name) for name in reading.__slots__} == {None}


def test_mig_instances_are_separate_devices():
    """Memory is that of the instance; power is reported for the whole GPU only."""

    def name(handle):
        return "NVIDIA A100" if handle == "gpu0" else "NVIDIA A100 MIG 1g.10gb"

    def memory(handle, version=None):
        total = 81920 if handle == "gpu0" else 9856
        return SimpleNamespace(total=total * MIB, used=5 * MIB, free=(total - 6) * MIB, reserved=MIB)

    binding = Gpm(
        nvmlDeviceGetMigMode=(1, 1),
        nvmlDeviceGetMaxMigDeviceCount=7,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda h, at: (
            f"mig{at}" if at in (0, 2) else refusal(pynvml.NVML_ERROR_NOT_FOUND)
        ),
        nvmlDeviceGetGpuInstanceId=lambda handle: 7 + int(handle[-1]),
        nvmlDeviceGetName=name,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetPowerUsage=250_000,
    )
    driver = NvmlDriver(binding, clock=count(0.0, 0.5).__next__)
    whole, gpu, two = driver.devices()
    assert (gpu.mig, two.mig, gpu.mig_profile, gpu.memory_mib) == ("7", "9", "1g.10gb", 9856.0)
    assert {gpu.uuid, two.uuid} == {whole.uuid}
    assert (driver.read(whole).power_w, driver.read(gpu).power_w) == (250.0, None)
    driver.read(two)
    assert driver.read(two).engine_active == 0.98
    assert binding.last == "gpu0/9"


def test_old_driver_has_no_reserved_memory():
    def memory(handle, version=None):
        return (
            refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            if version
            else SimpleNamespace(total=9 * MIB, used=2 * MIB, free=7 * MIB)
        )

    driver = NvmlDriver(Binding(nvmlDeviceGetMemoryInfo=memory))
    reading = driver.read(driver.devices()[0])
    assert (reading.fb_used_mib, reading.fb_free_mib, reading.fb_reserved_mib) == (2.0, 7.0, None)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLost),
        (pynvml.NVML_ERROR_RESET_REQUIRED, GpuLost),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, DriverMissing),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, DriverMissing),
        (pynvml.NVML_ERROR_UNKNOWN, DriverMissing),
        (pynvml.NVML_ERROR_TIMEOUT, GpuError),
    ],
)
def test_nvml_errors_are_translated(code, kind):
    """The message has the query and NVML's text."""
    binding = Binding()
    driver = NvmlDriver(binding)
    [device] = driver.devices()
    binding.answers["nvmlDeviceGetMemoryInfo"] = refusal(code)
    with pytest.raises(GpuError, match="memory of GPU 0") as caught:
        driver.read(device)
    assert type(caught.value) is kind


def test_gpu_lost_between_two_fields_is_reported_as_lost():
    driver = NvmlDriver(Binding(nvmlDeviceGetPowerUsage=refusal(pynvml.NVML_ERROR_GPU_IS_LOST)))
    with pytest.raises(GpuLost):
        driver.read(driver.devices()[0])


def test_processes_visible_to_root_only_raise_not_permitted():
    driver = NvmlDriver(Binding(nvmlDeviceGetGraphicsRunningProcesses=refusal(pynvml.NVML_ERROR_NO_PERMISSION)))
    with pytest.raises(NotPermitted):
        driver.processes(driver.devices()[0])


def sample(pid, time_us, sm, memory=0):
    return SimpleNamespace(pid=pid, timeStamp=time_us, smUtil=sm, memUtil=memory)


def test_invalid_process_utilization_is_ignored():
    """Shares above 100 %, entries without a process, and samples older than requested are invalid."""
    result = [sample(7, 150, 30), sample(7, 160, 4_000_000_000), sample(8, 90, 50), sample(0, 150, 90)]
    driver = NvmlDriver(Binding(nvmlDeviceGetProcessUtilization=lambda handle, since: result))
    assert [
        (process.pid, process.time_us, process.sm_pct)
        for process in driver.process_utilization(driver.devices()[0], 100)
    ] == [(7, 150, 30.0)]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS])
def test_no_active_process_is_an_empty_list(code):
    """The binding raises an error for it, even with the code for success."""
    driver = NvmlDriver(Binding(nvmlDeviceGetProcessUtilization=refusal(code)))
    assert list(driver.process_utilization(driver.devices()[0])) == []


def test_hint_names_the_directory_of_the_library(tmp_path, monkeypatch):
    """Some containers have NVIDIA's libraries in a directory that the loader does not search."""
    (tmp_path / "libnvidia-ml.so.1").touch()
    monkeypatch.setattr(nvml_errors, "_PLACES", ("/nowhere", str(tmp_path)))
    binding = Binding(nvmlAnything=refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    binding.nvmlInit = binding.nvmlAnything
    with pytest.raises(DriverMissing) as caught:
        NvmlDriver(binding).devices()
    assert f"LD_LIBRARY_PATH={tmp_path}" in caught.value.hint


def test_gpu_without_graphics_processes_lists_compute_processes():
    """NVML may refuse to list graphics processes. If it lists no compute processes either, both are unknown."""
    running = [SimpleNamespace(pid=7, usedGpuMemory=3 * MIB)]
    driver = NvmlDriver(Binding(nvmlDeviceGetComputeRunningProcesses=lambda handle: running))
    [device] = driver.devices()
    assert [(process.pid, process.used_mib, process.kind) for process in driver.processes(device)] == [
        (7, 3.0, "compute")
    ]
    limited = NvmlDriver(Binding())
    with pytest.raises(NotSupported):
        limited.processes(limited.devices()[0])
