"""The emulated GPUs as a program sees them through NVIDIA's own `cuda-bindings`."""

from __future__ import annotations

import pytest
from emulator.node import DriverError, Node

MIB = 1 << 20


def test_memory_keeps_its_contents(node: Node) -> None:
    """Data that was copied or set can be read back, also after copies within the GPU."""
    user = node.user()
    user.do("a, b = alloc(3), alloc(3)")
    written = user.get("fill(a, 3 * MIB - 7, 1)")
    assert user.get("digest(a, 3 * MIB - 7)") == written
    user.do("ok(d.cuMemcpyDtoD(b, a, 3 * MIB - 7))")
    assert user.get("digest(b, 3 * MIB - 7)") == written
    user.do("ok(d.cuMemsetD32(b, 0x01020304, MIB // 4)); ok(d.cuMemsetD8(a, 9, MIB))")
    assert user.get("digest(b, MIB) == hashlib.sha256(bytes([4, 3, 2, 1]) * (MIB // 4)).hexdigest()")
    assert user.get("digest(a, MIB) == hashlib.sha256(bytes([9]) * MIB).hexdigest()")
    assert user.get("digest(alloc(2), 100) == hashlib.sha256(bytes(100)).hexdigest()")


def test_gpu_memory_is_limited(node: Node) -> None:
    """An allocation that is too large fails without effect; two programs share the memory."""
    first, second = node.user(), node.user()
    assert first.get("list(ok(d.cuMemGetInfo()))") == [(4096 - 200) * MIB, 4096 * MIB]
    first.do("a = alloc(3000)")
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        second.do("alloc(1000)")
    second.do("alloc(800)")
    first.do("ok(d.cuMemFree(a))")
    second.do("alloc(1000)")
    assert first.get("ok(d.cuMemGetInfo())[0]") == (4096 - 2000) * MIB
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        first.do("ok(d.cuMemFree(a))")


def test_killed_program_frees_its_memory(node: Node) -> None:
    """No other process has to clean up."""
    user, agent = node.user(), node.agent()
    user.do("alloc(1000)")
    assert agent.get("n.nvmlDeviceGetMemoryInfo(handle(), n.nvmlMemory_v2).used") == 1100 * MIB
    user.kill()
    assert agent.get("n.nvmlDeviceGetMemoryInfo(handle(), n.nvmlMemory_v2).used") == 0
    assert agent.get("processes()") == {}


def test_released_context_frees_its_memory(node: Node) -> None:
    """The primary context is destroyed when its last user releases it."""
    user = node.user()
    user.do("alloc(1000); ok(d.cuDevicePrimaryCtxRelease(0))")
    assert node.show()["gpus"][0]["free_bytes"] == 4096 * MIB
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        user.do("alloc(1)")


def test_visible_devices_are_selected_in_order(node: Node) -> None:
    """CUDA_VISIBLE_DEVICES by index, UUID and prefix of a UUID."""
    uuids = [gpu["uuid"] for gpu in node.show()["gpus"]]
    seen = "[bytes(ok(d.cuDeviceGetUuid(i)).bytes).hex() for i in range(ok(d.cuDeviceGetCount()))]"
    for visible, expected in (("1,0", [1, 0]), ("1", [1]), (uuids[1], [1]), (uuids[1][:12], [1]), ("0,7,1", [0])):
        program = node.start(CUDA_VISIBLE_DEVICES=visible)
        program.do("ok(d.cuInit(0))")
        assert program.get(seen) == [uuids[index].removeprefix("GPU-").replace("-", "") for index in expected]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "2", "0,0"])
def test_program_without_visible_gpu_gets_error(node: Node, visible: str) -> None:
    """CUDA does not start for the program, but NVML still lists the GPUs."""
    program = node.start(CUDA_VISIBLE_DEVICES=visible)
    with pytest.raises(DriverError, match="CUDA_ERROR_NO_DEVICE"):
        program.do("ok(d.cuInit(0))")
    program.do("n.nvmlInit()")
    assert program.get("n.nvmlDeviceGetCount()") == 2


def test_device_attributes_equal_those_of_nvml(node: Node) -> None:
    """Name, size, capability and address equal those of NVML."""
    user = node.user()
    user.do("n.nvmlInit()")
    assert user.get("ok(d.cuDeviceGetName(64, 0)).rstrip(b' \\0').decode()") == "NVIDIA A100-SXM4-80GB"
    assert user.get("ok(d.cuDeviceTotalMem(0))") == 4096 * MIB
    assert user.get("ok(d.cuDeviceGetPCIBusId(32, 1)).rstrip(b' \\0').decode()") == "0000:0F:00.0"
    attribute = "ok(d.cuDeviceGetAttribute(d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_{}, 0))"
    assert user.get(attribute.format("MULTIPROCESSOR_COUNT")) == 108
    assert user.get(attribute.format("COMPUTE_CAPABILITY_MAJOR")) == 8
    assert user.get("ok(d.cuDriverGetVersion())") == 13000


def test_kernels_run_in_order_and_calls_wait(node: Node) -> None:
    """A stream is busy until its kernel ends; events measure the duration."""
    user = node.user()
    user.do("s = ok(d.cuStreamCreate(0)); a, b = ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))")
    user.do("ok(d.cuEventRecord(a, s)); busy(150, s); ok(d.cuEventRecord(b, s))")
    user.do("ok(d.cuStreamSynchronize(s)); ok(d.cuEventQuery(b))")
    assert user.get("ok(d.cuEventElapsedTime(a, b))") >= 150
    assert user.get("d.cuStreamQuery(s)[0].name") == "CUDA_SUCCESS"
    user.do("busy(600_000, s)")
    assert user.get("d.cuStreamQuery(s)[0].name") == "CUDA_ERROR_NOT_READY"


def test_kernel_changes_memory(node: Node) -> None:
    """Tests can thus verify that work was done."""
    user = node.user()
    user.do("a = alloc(1); ok(d.cuMemsetD32(a, 40, 1000)); u32, u64 = ctypes.c_uint32, ctypes.c_uint64")
    user.do("launch(b'add_u32', (a, 1000, 2, 1000), (u64, u64, u32, u64))")
    assert user.get("digest(a, 4000) == hashlib.sha256(bytes([42, 0, 0, 0]) * 1000).hexdigest()")
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_SUPPORTED"):
        user.do("launch(b'mystery', (1,), (u64,))")
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_FOUND"):
        user.do("launch(b'nowhere', (1,), (u64,))")


@pytest.mark.parametrize(
    ("image", "error"),
    [("b'hello\\0'", "CUDA_ERROR_INVALID_PTX"), ("b'\\x7fELF' + bytes(64)", "CUDA_ERROR_NO_BINARY_FOR_GPU")],
)
def test_invalid_module_is_rejected(node: Node, image: str, error: str) -> None:
    """Neither text nor machine code for a missing GPU is accepted."""
    with pytest.raises(DriverError, match=error):
        node.user().do(f"ok(d.cuModuleLoadData({image}))")


def test_lost_gpu_invalidates_its_contexts(node: Node) -> None:
    """Its contexts fail for good; a program that starts then sees only the other GPU."""
    user, other = node.user(), node.user(1)
    node.ctl("fault", "gpu-lost", "--gpu", "0")
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        user.do("alloc(1)")
    other.do("alloc(1)")
    late = node.start()
    late.do("ok(d.cuInit(0))")
    assert late.get("ok(d.cuDeviceGetCount())") == 1
    node.ctl("fault", "clear")
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        user.do("alloc(1)")


def test_xid_invalidates_contexts(node: Node) -> None:
    """Those on its GPU, with the corresponding error; a new program works."""
    user, other = node.user(), node.user(1)
    node.ctl("fault", "xid", "31", "--gpu", "0", "--kill")
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        user.do("ok(d.cuCtxSynchronize())")
    other.do("alloc(1)")
    node.user().do("alloc(1)")


def test_cuda_does_not_survive_fork(node: Node) -> None:
    """A child cannot use its parent's GPU, and its end frees none of the parent's memory."""
    user = node.user()
    user.do(
        "alloc(100); r, w = os.pipe(); pid = os.fork()\n"
        "if pid == 0:\n    os.write(w, d.cuCtxSynchronize()[0].name.encode()); os._exit(0)"
    )
    assert user.get("os.read(r, 100).decode()") == "CUDA_ERROR_NOT_INITIALIZED"
    user.do("os.waitpid(pid, 0); alloc(1)")
    assert [p["pid"] for p in node.show()["gpus"][0]["processes"]] == [user.pid]


def test_cuda_does_not_start_without_driver(bare_node: Node) -> None:
    """The node is not set up."""
    with pytest.raises(DriverError, match="CUDA_ERROR_NO_DEVICE"):
        bare_node.start().do("ok(d.cuInit(0))")


def test_functions_are_found_by_name_and_version(node: Node) -> None:
    """cuGetProcAddress: functions that are not emulated are missing, and an old driver has no checkpoint functions."""
    program = node.start()

    def ask(name: str, version: int) -> str:
        return str(program.get(f"ok(d.cuGetProcAddress({name.encode()!r}, {version}, 0))[1].name"))

    assert ask("cuMemAlloc", 12000).endswith("_SUCCESS")
    assert ask("cuCheckpointProcessLock", 12080).endswith("_SUCCESS")
    assert ask("cuCheckpointProcessLock", 12000).endswith("VERSION_NOT_SUFFICIENT")
    assert ask("cuGraphCreate", 12080).endswith("SYMBOL_NOT_FOUND")
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        ask("cuMemAlloc", 13010)


def test_node_in_use_is_not_set_up_again(node: Node) -> None:
    """Setup fails while a program uses the node."""
    user = node.user()
    with pytest.raises(Exception, match="returned non-zero exit status 1"):
        node.init()
    user.kill()
    node.init()
