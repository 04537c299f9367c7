"""The emulated GPUs as a monitor sees them through NVIDIA's own `pynvml`."""

from __future__ import annotations

import pytest
from emulator.node import DriverError, Node

MIB = 1 << 20


def test_gpus_are_found_by_index_uuid_address_and_serial(node: Node) -> None:
    """All identifiers of a GPU lead to the same handle."""
    agent = node.agent()
    assert agent.get("n.nvmlDeviceGetCount()") == 2
    agent.do("h = handle(1); p = n.nvmlDeviceGetPciInfo(h)")
    assert agent.get("n.nvmlDeviceGetName(h)") == "NVIDIA A100-SXM4-80GB"
    uuid = agent.get("n.nvmlDeviceGetUUID(h)")
    assert uuid.startswith("GPU-")
    assert len(uuid) == 40
    for text in (
        "n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))",
        "n.nvmlDeviceGetHandleByPciBusId(p.busId)",
        "n.nvmlDeviceGetHandleByPciBusId(p.busIdLegacy.lower())",
        "n.nvmlDeviceGetHandleBySerial(n.nvmlDeviceGetSerial(h))",
    ):
        assert agent.get(f"n.nvmlDeviceGetIndex({text})") == 1
    assert agent.get("n.nvmlDeviceGetMinorNumber(h)") == 1
    assert agent.get("[p.domain, p.bus, p.device]") == [0, 15, 0]
    assert agent.get("p.busId") == "00000000:0F:00.0"
    assert agent.get("n.nvmlDeviceGetCudaComputeCapability(h)") == [8, 0]


def test_versions_are_those_of_node(bare_node: Node) -> None:
    """Driver, NVML and CUDA versions."""
    bare_node.init("--gpus", "1", "--driver-version", "570.124.06", "--cuda-version", "12.8")
    agent = bare_node.agent()
    assert agent.get("n.nvmlSystemGetDriverVersion()") == "570.124.06"
    assert agent.get("n.nvmlSystemGetNVMLVersion()") == "12.570.124.06"
    assert agent.get("n.nvmlSystemGetCudaDriverVersion()") == 12080


def test_memory_is_reported_with_and_without_reserved_part(node: Node) -> None:
    """Version 1 counts the driver's own memory as used, version 2 reports it separately."""
    agent, user = node.agent(), node.user()
    user.do("alloc(500)")
    agent.do("a = n.nvmlDeviceGetMemoryInfo(handle()); b = n.nvmlDeviceGetMemoryInfo(handle(), n.nvmlMemory_v2)")
    total, free, used = agent.get("[a.total, a.free, a.used]")
    assert used == total - free
    assert agent.get("[b.total, b.free, b.used]") == [total, free, 600 * MIB]
    assert agent.get("b.total - b.free - b.used - b.reserved") == 0
    assert free == (4096 - 600) * MIB
    assert agent.get("n.nvmlDeviceGetMemoryInfo(handle(1), n.nvmlMemory_v2).used") == 0


def test_processes_are_listed_with_their_memory(node: Node) -> None:
    """There are several processes on one GPU and one on both; processes without a context are not listed."""
    agent, first, second = node.agent(), node.user(), node.user(1)
    agent.do("ok(d.cuInit(0))")
    first.do("alloc(300)")
    second.do("alloc(1); use(0); alloc(7)")
    assert agent.get("processes(0)") == {str(first.pid): 400 * MIB, str(second.pid): 108 * MIB}
    assert agent.get("processes(1)") == {str(second.pid): 102 * MIB}
    assert agent.get("n.nvmlDeviceGetGraphicsRunningProcesses(handle())") == []
    assert "python" in agent.get(f"n.nvmlSystemGetProcessName({first.pid})")
    agent.do("version, mode = n.nvmlProcessDetailList_v1, n.NVML_PROCESS_MODE_COMPUTE")
    details = "n.nvmlDeviceGetRunningProcessDetailList(handle(1), version, mode)"
    assert agent.get(f"[[p.pid, p.usedGpuMemory] for p in {details}]") == [[second.pid, 102 * MIB]]


def test_utilization_follows_the_kernels(bare_node: Node) -> None:
    """Only the GPU with work is 100 % busy, uses more power and energy; an idle one is at 0."""
    bare_node.init("--gpus", "2", "--sample-period-ms", "100")
    agent, user, idler = bare_node.agent(), bare_node.user(), bare_node.user()
    util, idle_mw = "n.nvmlDeviceGetUtilizationRates(handle()).gpu", agent.get("n.nvmlDeviceGetPowerUsage(handle())")
    assert agent.get(util) == 0
    before_mj = agent.get("n.nvmlDeviceGetTotalEnergyConsumption(handle())")
    user.do("busy(600_000)")
    agent.until(util, lambda percent: percent == 100)
    assert agent.get("n.nvmlDeviceGetUtilizationRates(handle(1)).gpu") == 0
    assert agent.get("n.nvmlDeviceGetPowerUsage(handle())") > 2 * idle_mw
    assert agent.get("n.nvmlDeviceGetTotalEnergyConsumption(handle())") > before_mj
    assert agent.get("n.nvmlDeviceGetFieldValues(handle(), [n.NVML_FI_DEV_POWER_INSTANT])[0].value.uiVal") > 2 * idle_mw
    sampled = agent.get("[[s.pid, s.smUtil] for s in n.nvmlDeviceGetProcessUtilization(handle(), 0)]")
    assert sampled == [[user.pid, 100]]
    sampled = agent.get("[[s.pid, s.smUtil] for s in n.nvmlDeviceGetProcessesUtilizationInfo(handle(), 0)]")
    assert sampled == [[user.pid, 100]]
    assert idler.pid not in [pid for pid, _ in sampled]
    user.kill()
    agent.until(util, lambda percent: percent == 0)
    with pytest.raises(DriverError, match="NVMLError_NotFound"):
        agent.do("n.nvmlDeviceGetProcessUtilization(handle(), 0)")


def test_mig_and_ecc_are_off(node: Node) -> None:
    """A GPU that supports MIG reports that it is off."""
    agent = node.agent()
    assert agent.get("n.nvmlDeviceGetMigMode(handle())") == [0, 0]
    assert agent.get("n.nvmlDeviceIsMigDeviceHandle(handle()).value") == 0
    assert agent.get("n.nvmlDeviceGetEccMode(handle())") == [0, 0]
    assert agent.get("n.nvmlGpmQueryDeviceSupport(handle()).isSupportedDevice") == 0
    with pytest.raises(DriverError, match="NVMLError_NotFound"):
        agent.do("n.nvmlDeviceGetMigDeviceHandleByIndex(handle(), 0)")


def test_hopper_has_performance_counters(bare_node: Node) -> None:
    """Between two samples, the engine is as busy as the kernels were; older GPUs have no counters."""
    bare_node.init("--model", "h100-80g", "--gpus", "1")
    user = bare_node.user()
    user.do("n.nvmlInit()")
    assert user.get("n.nvmlGpmQueryDeviceSupport(handle()).isSupportedDevice") == 1
    user.do("before, after = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()")
    user.do(
        "n.nvmlGpmSampleGet(handle(), before); busy(300); ok(d.cuCtxSynchronize()); n.nvmlGpmSampleGet(handle(), after)"
    )
    query = """
request = n.c_nvmlGpmMetricsGet_t()
request.version, request.numMetrics = n.NVML_GPM_METRICS_GET_VERSION, 3
request.sample1, request.sample2 = before, after
for at, number in enumerate((1, 10, 99)):
    request.metrics[at].metricId = number
n.nvmlGpmMetricsGet(request)
result = [(one.nvmlReturn, one.value) for one in request.metrics[:2]] + [request.metrics[2].nvmlReturn]
"""
    (engine_rc, engine), (dram_rc, dram), unknown_rc = user.do(query)
    assert (engine_rc, dram_rc, unknown_rc != 0) == (0, 0, True)
    assert 20 < engine <= 100
    assert abs(dram - engine / 3) < 0.01
    user.do("import time; n.nvmlGpmSampleGet(handle(), before); time.sleep(0.2); n.nvmlGpmSampleGet(handle(), after)")
    (_, engine), (_, dram), _ = user.do(query)
    assert (engine, dram) == (pytest.approx(0.0062), 0)  # an idle context, as an H200 reads it
    user.do("n.nvmlGpmSampleFree(before); n.nvmlGpmSampleFree(after)")


def test_mig_is_not_supported_on_old_gpu(bare_node: Node) -> None:
    """An example is the T4."""
    bare_node.init("--model", "t4", "--gpus", "1")
    with pytest.raises(DriverError, match="NVMLError_NotSupported"):
        bare_node.agent().do("n.nvmlDeviceGetMigMode(handle())")


def test_xid_wakes_waiting_program(node: Node) -> None:
    """Only for its GPU, with its number, and once."""
    agent, other = node.agent(), node.agent()
    for program, index in ((agent, 1), (other, 0)):
        program.do("s = n.nvmlEventSetCreate()")
        program.do(f"n.nvmlDeviceRegisterEvents(handle({index}), n.nvmlEventTypeXidCriticalError, s)")
    agent.send("e = n.nvmlEventSetWait_v2(s, 30_000); result = [e.eventType, e.eventData]")
    node.ctl("fault", "xid", "31", "--gpu", "1")
    assert agent.receive() == [8, 31]
    assert agent.get("n.nvmlDeviceGetIndex(e.device)") == 1
    for program in (agent, other):
        with pytest.raises(DriverError, match="NVMLError_Timeout"):
            program.do("n.nvmlEventSetWait_v2(s, 1)")


def test_lost_gpu_is_reported(node: Node) -> None:
    """Its handles return an error, the other GPU's do not; after the fault it works again."""
    agent = node.agent()
    agent.do("h = handle(0)")
    node.ctl("fault", "gpu-lost", "--gpu", "0")
    for question in ("n.nvmlDeviceGetMemoryInfo(h)", "n.nvmlDeviceGetUtilizationRates(h)", "handle(0)", "processes(0)"):
        with pytest.raises(DriverError, match="NVMLError_GpuIsLost"):
            agent.do(question)
    assert agent.get("n.nvmlDeviceGetName(handle(1))")
    node.ctl("fault", "clear")
    assert agent.get("n.nvmlDeviceGetName(h)")


def test_utilization_may_be_unsupported(node: Node) -> None:
    """Memory can be read even if utilization cannot."""
    agent = node.agent()
    node.ctl("fault", "util-unsupported", "--gpu", "0")
    for question in ("n.nvmlDeviceGetUtilizationRates(handle())", "n.nvmlDeviceGetProcessUtilization(handle(), 0)"):
        with pytest.raises(DriverError, match="NVMLError_NotSupported"):
            agent.do(question)
    assert agent.get("n.nvmlDeviceGetMemoryInfo(handle()).total") > 0
    assert agent.get("n.nvmlDeviceGetUtilizationRates(handle(1)).gpu") == 0


def test_nvml_works_again_after_reload(node: Node) -> None:
    """As when the driver is reloaded below a running agent."""
    agent = node.agent()
    node.ctl("fault", "nvml-lost")
    with pytest.raises(DriverError, match="NVMLError_Unknown"):
        agent.do("handle(0)")
    agent.do("n.nvmlShutdown()")
    with pytest.raises(DriverError, match="NVMLError_DriverNotLoaded"):
        agent.do("n.nvmlInit()")
    node.ctl("fault", "nvml-lost", "--off")
    agent.do("n.nvmlInit()")
    assert agent.get("n.nvmlDeviceGetCount()") == 2


def test_invalid_calls_have_distinct_errors(node: Node) -> None:
    """Not initialized, no such GPU, no such UUID."""
    program = node.start()
    with pytest.raises(DriverError, match="NVMLError_Uninitialized"):
        program.do("n._LoadNvmlLibrary(); n.nvmlDeviceGetCount()")
    program.do("n.nvmlInit()")
    for question, error in (
        ("handle(2)", "NVMLError_InvalidArgument"),
        ("n.nvmlDeviceGetHandleByUUID('GPU-00000000-0000-0000-0000-000000000000')", "NVMLError_NotFound"),
        ("n.nvmlDeviceGetHandleByPciBusId('00000000:77:00.0')", "NVMLError_NotFound"),
        ("n.nvmlSystemGetProcessName(4194304)", "NVMLError_NotFound"),
        ("n.nvmlDeviceGetFanSpeed(handle())", "NVMLError_NotSupported"),
        ("n.nvmlDeviceGetVgpuMetadata(handle())", "NVMLError_FunctionNotFound"),
    ):
        with pytest.raises(DriverError, match=error):
            program.do(question)


def test_nvml_does_not_start_without_driver(bare_node: Node) -> None:
    """The node is not set up."""
    with pytest.raises(DriverError, match="NVMLError_DriverNotLoaded"):
        bare_node.agent()


def test_nvml_alone_leaves_nothing_open(node: Node) -> None:
    """A program that only monitors can be dumped without preparation."""
    agent = node.agent()
    agent.do("handle(0); processes(0)")
    assert not [name for name in agent.get("opened()") if str(node.directory) in name]
    assert str(node.directory) not in agent.get("open('/proc/self/maps').read()")
