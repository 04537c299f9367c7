"""The interface to NVML (``NvmlDriver``) on the emulated driver."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.gpu_driver import FaultSuite, FaultyMachine
from emulator.node import Node, Program
from emulator.remote_driver import RemoteDriver
from waiting import DEADLINE_S, wait_until

from slurm_affinode.gpu.interface import DriverMissing

SETUP = """
from dataclasses import asdict
from slurm_affinode.gpu import interface, nvml
clock = [0.0]
driver = nvml.NvmlDriver(clock=lambda: clock[0])
def errors(ask):
    try:
        return ask()
    except interface.GpuError as error:
        return type(error).__name__
def device(index=0):
    return next(one for one in driver.devices() if one.index == index)
def reading(index=0):
    return errors(lambda: asdict(driver.read(device(index))))
"""


class TestConformance(FaultSuite):
    """NVIDIA's binding on the emulator's shared library."""

    @pytest.fixture
    def machine(self, node: Node) -> FaultyMachine:
        def fault(*words: str) -> Callable[[], object]:
            return lambda: node.ctl("fault", *words)

        return FaultyMachine(
            RemoteDriver(node.start()),
            lose=fault("gpu-lost", "--gpu", "0"),
            unload=fault("nvml-lost"),
            load=fault("nvml-lost", "--off"),
        )


def test_driver_that_is_installed_later_is_used(bare_node: Node) -> None:
    """By a program that was started without it."""
    driver = RemoteDriver(bare_node.start())
    with pytest.raises(DriverMissing):
        driver.devices()
    bare_node.init()
    assert len(driver.devices()) == 2


@pytest.fixture
def watcher(node: Node) -> Program:
    """A program with a driver, on a node with two GPUs of 4096 MiB."""
    program = node.start()
    program.do(SETUP)
    return program


def test_devices_are_described(watcher: Program) -> None:
    """UUID, address, index and model."""
    first, second = watcher.get("[asdict(one) for one in driver.devices()]")
    assert first["uuid"].startswith("GPU-")
    assert first["uuid"] != second["uuid"]
    assert (second["index"], second["minor"], second["pci"]) == (1, 1, "00000000:0F:00.0")
    assert (first["model"], first["mig"], first["mig_profile"]) == ("NVIDIA A100-SXM4-80GB", None, None)


def test_reading_follows_work(node: Node, watcher: Program) -> None:
    """Utilization, memory without the reserved part, power; values that this GPU does not support are None."""
    idle = watcher.get("reading()")
    assert (idle["util_pct"], idle["fb_used_mib"], idle["xid"]) == (0.0, 0.0, 0)
    assert (idle["engine_active"], idle["sm_active"], idle["dram_active"]) == (None, None, None)
    total = idle["fb_used_mib"] + idle["fb_free_mib"] + idle["fb_reserved_mib"]
    assert total == idle["fb_total_mib"]
    user = node.user()
    user.do("alloc(500); busy(600_000)")
    busy = watcher.until("reading()", lambda reading: reading["util_pct"] == 100)
    assert busy["fb_used_mib"] == 600
    assert busy["power_w"] > 2 * idle["power_w"]
    assert busy["energy_mj"] > idle["energy_mj"]
    assert watcher.get("[[p.pid, p.used_mib, p.kind] for p in driver.processes(device())]") == [
        [user.pid, 600.0, "compute"]
    ]
    [[pid, share]] = watcher.get("[[p.pid, p.sm_pct] for p in driver.process_utilization(device())]")
    assert pid == user.pid
    assert share > 90
    assert watcher.get("driver.processes(device(1))") == []
    assert watcher.get("list(driver.process_utilization(device(1)))") == []


def test_lost_gpu_is_a_fault_until_a_later_scan(node: Node, watcher: Program) -> None:
    """After the fault, it is listed again."""
    watcher.get("len(driver.devices())")
    node.ctl("fault", "gpu-lost", "--gpu", "0")
    assert watcher.get("reading(0)") == "GpuLost"
    watcher.do("clock[0] += nvml.RESCAN_S")
    assert watcher.get("[one.index for one in driver.devices()]") == [1]
    [fault] = watcher.get("[asdict(one) for one in driver.faults()]")
    assert fault["index"] == 0
    assert "lost" in fault["reason"]
    node.ctl("fault", "clear")
    watcher.do("clock[0] += nvml.RESCAN_S")
    assert watcher.get("[one.index for one in driver.devices()]") == [0, 1]
    assert watcher.get("list(driver.faults())") == []


def test_unsupported_utilization_is_none(node: Node, watcher: Program) -> None:
    """It is not 0, and the other values are available."""
    node.ctl("fault", "util-unsupported", "--gpu", "0")
    reading = watcher.get("reading()")
    assert reading["util_pct"] is None
    assert reading["fb_used_mib"] == 0
    assert watcher.get("errors(lambda: driver.process_utilization(device()))") == "NotSupported"


def test_xid_is_recorded_for_its_gpu(node: Node, watcher: Program) -> None:
    """The last one is kept, even after the driver is reopened."""
    assert watcher.get("[reading(0)['xid'], reading(1)['xid']]") == [0, 0]
    node.ctl("fault", "xid", "31", "--gpu", "1")
    node.ctl("fault", "xid", "79", "--gpu", "1")
    assert watcher.until("[reading(0)['xid'], reading(1)['xid']]", lambda seen: seen == [0, 79])
    watcher.do("driver.close()")
    assert watcher.get("reading(1)['xid']") == 79


# --- the exporter on it


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        text: str = answer.read().decode()
        return text


def test_exporter_serves_metrics_and_writes_samples(node: Node, tmp_path: Path) -> None:
    """Metrics over HTTP; SIGHUP closes a file, SIGTERM exits with all samples in files; the process stays small."""
    spool, jobs = tmp_path / "spool", tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "1").write_text("4711\n")
    argv = [
        str(Path(sys.executable).with_name("slurm-affinode")),
        "exporter",
        "--listen",
        "127.0.0.1:0",
        "--period",
        "0.2s",
    ]
    argv += ["--spool", str(spool), "--job-map", str(jobs), "--node", "c1", "--cluster", "alpha"]
    process = subprocess.Popen(argv, env=node.env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        started = process.stderr.readline()
        port = int(started.rpartition(":")[2].partition("/")[0])
        user = node.user(1)
        user.do("alloc(500); busy(600_000)")
        text = wait_until("it is busy", lambda: scrape(port), lambda text: "} 100.0" in text)
        assert 'DCGM_FI_DEV_FB_USED{Hostname="c1"' in text
        assert 'hpc_job="4711"' in text
        rss_mib = (
            next(float(line.split()[1]) for line in text.splitlines() if line.startswith("process_resident")) / 2**20
        )
        assert rss_mib < 80
        process.send_signal(signal.SIGHUP)
        [parquet] = wait_until("the file is closed", lambda: list(spool.glob("*.parquet")))
        wait_until("there is another", lambda: list(spool.glob("*.part")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    # The last file stays text until the next start if its conversion takes too long.
    assert sorted(path.suffix for path in spool.iterdir()) in ([".parquet", ".parquet"], [".csv", ".parquet"])
    state = tmp_path / "state"
    taken = subprocess.run(
        [argv[0], "ingest", "gpu", "--json", "--state", str(state), str(spool)],
        check=True, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    summary = json.loads(taken.stdout)
    assert (summary["devices"], summary["nodes"], summary["new"]) == (2, 1, summary["samples"])
    assert parquet.exists()
