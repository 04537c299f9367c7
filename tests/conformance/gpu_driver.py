"""Conformance suite of ``gpu.interface.GpuDriver``: NVML on real, emulated and faked GPUs, and fakes of other tests.

A test file subclasses ``GpuDriverSuite`` and defines the fixture ``machine``. ``FaultSuite`` has the tests that need
faults, which only emulated and faked drivers can have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import pytest

from slurm_affinode.gpu.interface import DriverMissing, GpuDriver, GpuLost, NotPermitted, NotSupported
from slurm_affinode.model.gpu import Device

_SHARES = ("engine_active", "sm_active", "tensor_active", "dram_active")
_PERCENTAGES = ("util_pct", "memory_util_pct")


@dataclass(frozen=True)
class GpuMachine:
    """A machine with a driver."""

    driver: GpuDriver


@dataclass(frozen=True)
class FaultyMachine(GpuMachine):
    """A machine with a driver and at least two GPUs, which can fail."""

    lose: Callable[[], object]
    """Make the GPU with index 0 unavailable."""
    unload: Callable[[], object]
    """Remove the driver."""
    load: Callable[[], object]
    """Load the driver again."""


def _queries(driver: GpuDriver, device: Device) -> tuple[Callable[[], object], ...]:
    """Return all queries of a device."""
    return (
        lambda: driver.read(device),
        lambda: driver.free_mib(device),
        lambda: driver.processes(device),
        lambda: driver.process_utilization(device),
    )


class GpuDriverSuite:
    """Tests for a driver with at least one GPU."""

    def test_devices_are_listed_by_index_and_repeatedly(self, machine: GpuMachine) -> None:
        """The same devices, whose identity is unique."""
        devices = machine.driver.devices()
        assert devices
        assert list(devices) == sorted(devices, key=lambda device: device.index)
        assert len({(device.uuid, device.mig) for device in devices}) == len(devices)
        assert list(machine.driver.devices()) == list(devices)
        assert list(machine.driver.faults()) == []

    def test_values_of_a_reading_are_in_range_or_none(self, machine: GpuMachine) -> None:
        """Shares are fractions, percentages at most 100; the second reading has the activity since the first."""
        driver = machine.driver
        for device in driver.devices():
            for reading in (driver.read(device), driver.read(device)):
                values = {field.name: getattr(reading, field.name) for field in fields(reading)}
                assert all(value is None or value >= 0 for value in values.values()), values
                assert all((values[name] or 0) <= 1 for name in _SHARES), values
                assert all((values[name] or 0) <= 100 for name in _PERCENTAGES), values
                if reading.fb_free_mib is not None and reading.fb_total_mib is not None:
                    assert reading.fb_free_mib <= reading.fb_total_mib

    def test_free_memory_is_that_of_a_reading(self, machine: GpuMachine) -> None:
        """Known or unknown in both. Other programs may allocate memory in between."""
        driver = machine.driver
        for device in driver.devices():
            free, read = driver.free_mib(device), driver.read(device).fb_free_mib
            assert (free is None) == (read is None)

    def test_processes_have_distinct_pids(self, machine: GpuMachine) -> None:
        """Repeated queries are allowed; utilization that the GPU does not support is an error, not an idle process."""
        driver = machine.driver
        for device in driver.devices():
            for _ in range(2):
                processes = driver.processes(device)
                assert len({process.pid for process in processes}) == len(processes)
                with suppress(NotSupported, NotPermitted):
                    assert all(0 <= process.sm_pct <= 100 for process in driver.process_utilization(device))

    def test_device_that_is_not_listed_is_lost(self, machine: GpuMachine) -> None:
        """The GPU was removed, or its MIG instances were created again."""
        driver = machine.driver
        gone = replace(driver.devices()[0], uuid="GPU-ffffffff-0000-0000-0000-000000000000")
        for query in _queries(driver, gone):
            with pytest.raises(GpuLost):
                query()

    def test_version_has_a_branch(self, machine: GpuMachine) -> None:
        """``580.95.05``: other modules read the branch."""
        assert machine.driver.version().partition(".")[0].isdecimal()

    def test_close_is_idempotent_and_the_next_use_opens_again(self, machine: GpuMachine) -> None:
        """Devices that were listed before remain valid."""
        driver = machine.driver
        driver.close()
        devices = driver.devices()
        driver.close()
        driver.close()
        driver.read(devices[0])
        assert list(driver.devices()) == list(devices)


class FaultSuite(GpuDriverSuite):
    """Further tests, for a driver that can fail."""

    def test_lost_gpu_does_not_affect_others(self, machine: FaultyMachine) -> None:
        """Each query of the lost GPU is an error, never a value; the others are still available."""
        driver = machine.driver
        first, second = driver.devices()[:2]
        machine.lose()
        for query in _queries(driver, first):
            with pytest.raises(GpuLost):
                query()
        for query in _queries(driver, second):
            query()

    def test_driver_that_was_unloaded_is_missing_until_it_is_loaded(self, machine: FaultyMachine) -> None:
        """No query returns values of the past. A reload needs no new client."""
        driver = machine.driver
        devices = driver.devices()
        machine.unload()
        for query in (*_queries(driver, devices[0]), driver.devices, driver.version):
            with pytest.raises(DriverMissing):
                query()
        driver.close()
        machine.load()
        assert list(driver.devices()) == list(devices)
        driver.read(devices[0])
