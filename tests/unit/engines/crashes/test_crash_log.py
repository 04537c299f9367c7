"""Failures in logs: the messages of each program, damaged logs, and bounded results."""

# ruff: noqa: E501 - messages as the programs write them

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from slurm_affinode.engines.crashes import crash_log
from slurm_affinode.engines.crashes.crash_log import MOST_KEPT, LogFailure, LogFindings, scan

GIB = 2**30
MIB = 2**20


def findings(text: str | bytes, *, block: int = 1 << 20) -> LogFindings:
    data = text.encode() if isinstance(text, str) else text
    return scan((data[at : at + block] for at in range(0, len(data), block)), "job.out")


def only(text: str | bytes) -> LogFailure:
    result = findings(text)
    assert len(result.failures) == 1, result.failures
    return result.failures[0]


def test_torch_message_gives_sizes_and_holders() -> None:
    item = only(
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of "
        "79.25 GiB of which 512.00 MiB is free. Process 4321 has 30.00 GiB memory in use. Process 99 has 1.00 GiB memory "
        "in use. Including non-PyTorch memory, this process has 47.75 GiB memory in use. Of the allocated memory 40.00 GiB "
        "is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    assert (item.kind, item.memory, item.process, item.gpu) == ("gpu-out-of-memory", "gpu", "rank 3", "1")
    assert (item.requested, item.free, item.total) == (2.5 * GIB, 512 * MIB, 79.25 * GIB)
    assert (item.used, item.unused) == (47.75 * GIB, 3 * GIB)
    assert item.holders == ((4321, 30.0 * GIB), (99, 1.0 * GIB))


def test_message_of_older_torch_gives_sizes() -> None:
    item = only(
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.75 GiB total capacity; 9.50 GiB already "
        "allocated; 10.50 MiB free; 9.75 GiB reserved in total by PyTorch)\n"
    )
    assert (item.kind, item.requested, item.free, item.total) == (
        "gpu-out-of-memory",
        20 * MIB,
        10.5 * MIB,
        10.75 * GIB,
    )


@pytest.mark.parametrize(
    ("line", "kind", "requested"),
    [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB", "gpu-out-of-memory", GIB),
        ("RuntimeError: CUDA error: out of memory", "gpu-out-of-memory", None),
        ("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY", "gpu-out-of-memory", None),
        ("alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory", "gpu-out-of-memory",
         4096 * MIB),
        ("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
         "gpu-out-of-memory", 16 * GIB),
        ("ValueError: No available memory for the cache blocks. Try a larger share.", "no-kv-cache-memory", None),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "no-kv-cache-memory", None),
        ("ValueError: Free memory on device cuda:0 (10.5/79.0 GiB) on startup is less than desired GPU memory utilization "
         "(0.9, 71.1 GiB).", "gpu-memory-at-startup", 71.1 * GIB),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.",
         "host-allocation", 4 * GIB),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape (100000, 100000)",
         "host-allocation", 74.5 * GIB),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host-allocation", None),
        ("bash: fork: Cannot allocate memory", "host-allocation", None),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=77.batch. Some of the step tasks have been OOM Killed.",
         "job-memory-limit", None),
        ("slurmstepd: error: Detected 3 oom-kill event(s) in StepId=77.0 cgroup.", "job-memory-limit", None),
        ("OSError: [Errno 28] No space left on device", "disk-full", None),
        ("RuntimeError: unable to allocate shared memory (shm) for file </torch_1>: Resource temporarily unavailable",
         "shared-memory", None),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "gpu-fault", None),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "gpu-fault", None),
        ("slurmstepd: error: *** JOB 77 ON c1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***", "time-limit", None),
        ("slurmstepd: error: *** STEP 77.0 ON c1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***", "preempted",
         None),
        ("slurmstepd: error: *** JOB 77 ON c1 CANCELLED AT 2026-01-01T00:00:00 ***", "canceled", None),
        ("[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:1, ncclSystemError", "collective",
         None),
        ("[E101 ProcessGroupNCCL.cpp:1] [Rank 0] Watchdog caught collective operation timeout", "collective", None),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "engine-ended", None),
        ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.", "worker-ended", None),
        ("[2026-01-01 00:00:00 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 4", "retraction", None),
        ("/var/spool/slurmd/job00077/slurm_script: line 4:  1234 Killed                  python train.py", "crash", None),
        ("Segmentation fault (core dumped)", "crash", None),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "gpu-out-of-memory", None),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "gpu-fault", None),
        ("n1:7:9 [0] NCCL WARN Cuda failure 2 'out of memory'", "gpu-out-of-memory", None),
        ("[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMalloc(ptr, n): out of memory (a.h:1)", "gpu-out-of-memory",
         None),
        ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1024 bytes", "gpu-out-of-memory", 1024),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 745. GiB for an array with shape (7,)",
         "host-allocation", 745 * GIB),
        ("java.lang.OutOfMemoryError: Java heap space", "host-allocation", None),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "node-out-of-memory",
         None),
        ("srun: error: gpu01: tasks 0-3: Out Of Memory", "job-memory-limit", None),
        ("srun: error: gpu01: task 2: Killed", "crash", None),
        ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory.", "shared-memory", None),
        ("RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)", "shared-memory", None),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/nccl-1'", "shared-memory", None),
        ("Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", "worker-ended", None),
        ("RuntimeError: Engine process (pid 7) died.", "engine-ended", None),
        ("[launcher.py:1] [shutdown] API server: shutdown triggered", "shutdown", None),
        ("(EngineCore pid=3) INFO 01-01 00:00:00 [core.py:1] [shutdown] EngineCore: trigger received signal=SIGTERM",
         "shutdown", None),
        ("WARNING 01-01 00:00:00 scheduler.py:1] Sequence group 7 is preempted by PreemptionMode.RECOMPUTE mode",
         "retraction", None),
        ("text_generation_client: Not enough memory to handle 4145 prefill tokens.", "no-kv-cache-memory", None),
        ("Memory access fault by GPU node-2 (Agent handle: 0x1) on address 0x2. Reason: Unknown.", "gpu-fault", None),
    ],
)  # fmt: skip
def test_message_is_recognized(line: str, kind: str, requested: float | None) -> None:
    item = only(f"before\n{line}\nafter\n")
    assert (item.kind, item.line, item.requested) == (kind, 2, requested)


def test_triggers_are_few_enough_for_the_fast_search() -> None:
    assert len(crash_log.TRIGGERS) <= 64


def test_kernel_names_the_killed_process_and_its_memory() -> None:
    item = only(
        "[123.4] Memory cgroup out of memory: Killed process 4711 (python) total-vm:9000kB, anon-rss:4096kB, "
        "file-rss:1024kB, shmem-rss:512kB, UID:1000\n"
    )
    assert (item.kind, item.pid, item.process, item.used) == ("job-memory-limit", 4711, "python", 5632 * 1024)


def test_full_cache_of_sglang_reports_the_tokens() -> None:
    """A batch that does not fit ends SGLang: its message continues on the next lines."""
    failure = findings(
        "[2026-01-01 00:00:00 TP0] Prefill out of memory. Try to lower your batch size.\n"
        "Try to allocate 8192 tokens.\nAvailable tokens: 200 (available_size=200 + evictable_size=0)\n\n"
        "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n'
        "RuntimeError: Prefill out of memory. Try to lower your batch size.\n"
        "Try to allocate 8192 tokens.\nAvailable tokens: 200\n"
    ).failures[0]
    assert (failure.kind, failure.memory, failure.requested) == ("kv-cache-exhausted", "kv-cache", None)
    assert (failure.requested_tokens, failure.free_tokens) == (8192, 200)


KILL = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9000kB, anon-rss:4096kB, file-rss:0kB"


def test_lines_of_the_kernel_about_one_process_are_one_failure() -> None:
    """The first line names the job, the second one the memory, and one before them the limit."""
    item = only(
        "[1.0] memory: usage 8192kB, limit 8192kB, failcnt 3\n"
        "[1.1] oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/system.slice/slurmstepd.scope/job_77,task_memcg=/system.slice/"
        "slurmstepd.scope/job_77/step_batch/user/task_0,task=python,pid=4711,uid=1000\n"
        f"[1.2] {KILL}\n"
    )
    assert (item.job, item.pid, item.process, item.used, item.total) == (77, 4711, "python", 4 * MIB, 8 * MIB)


def test_lines_of_an_older_kernel_about_one_process_are_one_failure() -> None:
    item = only(
        "[1.0] Task in /slurm/uid_1000/job_77/step_0 killed as a result of limit of /slurm/uid_1000/job_77\n"
        "[1.0] memory: usage 8192kB, limit 8192kB, failcnt 3\n"
        "[1.1] Memory cgroup out of memory: Kill process 4711 (python) score 999 or sacrifice child\n"
        "[1.2] Killed process 4711 (python) total-vm:9000kB, anon-rss:4096kB, file-rss:0kB\n"
    )
    assert (item.kind, item.job, item.pid, item.used, item.total) == ("job-memory-limit", 77, 4711, 4 * MIB, 8 * MIB)


def test_kills_of_two_processes_are_two_failures() -> None:
    constraint = "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/job_{0}/step_0,task=python,pid=471{0},uid=1000\n"
    text = "".join(constraint.format(n) + KILL.replace("4711", f"471{n}") + "\n" for n in (1, 2))
    assert [(failure.job, failure.pid, failure.used) for failure in findings(text).failures] == [
        (1, 4711, 4 * MIB),
        (2, 4712, 4 * MIB),
    ]


@pytest.mark.parametrize(
    ("line", "kind", "requested"),
    [
        ("c1:9:44 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-k2Hgfe to 9637892 bytes",
         "shared-memory", None),
        ("include/shm.h:26 NCCL WARN Call to posix_fallocate failed : No space left on device", "shared-memory", None),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1234'", "shared-memory", None),
        ("OSError: [Errno 28] No space left on device: '/scratch/dev/shm.txt'", "disk-full", None),
        ("transport/net.cc NCCL WARN NET/Socket : connection refused", "collective", None),
        ("RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "gpu-out-of-memory", None),
        ("RuntimeError: CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:119", None, None),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 2.0GiB (2147483648B) on device ordinal 0",
         "gpu-out-of-memory", 2 * GIB),
        ("Failed to allocate a port for the server", None, None),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "node-out-of-memory",
         None),
        ("(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed",
         "node-out-of-memory", None),
        ("(raylet) 1 Workers killed due to a request of the user", None, None),
        ("RuntimeError: Buffer overflow when allocating memory for batch_prefill_tmp_v with size 420478976 and alignment 16,"
         " but only 402653184 bytes available in AlignedAllocator. Increase the workspace buffer size.",
         "workspace-too-small", 420478976),
        ("AlignedAllocator uses 402653184 bytes", None, None),
        ("llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
         "no-kv-cache-memory", None),
        ("alloc_tensor_range: failed to allocate CUDA0 buffer of size 17179869184 bytes", "gpu-out-of-memory", 16 * GIB),
        ("alloc_tensor_range: failed to allocate CPU buffer of size 17179869184 bytes", "host-allocation", None),
        ("update_slots: failed to find free space in the KV cache, retrying with smaller batch size", "kv-cache-exhausted",
         None),
        ("decode: failed to find a memory slot for batch of size 512", "kv-cache-exhausted", None),
        ("error: failed to find a model file", None, None),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to "
         "allocate 4294967296 bytes.", "host-allocation", 4 * GIB),
        ("INFO there is not enough memory for a larger batch", None, None),
    ],
)  # fmt: skip
def test_specific_message_is_distinguished_from_a_similar_one(
    line: str, kind: str | None, requested: float | None
) -> None:
    """The memory that ran out is named by the most specific rule."""
    failures = findings(line + "\n").failures
    assert [(failure.kind, failure.requested) for failure in failures] == ([] if kind is None else [(kind, requested)])


@pytest.mark.parametrize(
    ("others", "used", "holders"),
    [
        ("Process 9 has 76.00 GiB memory in use. ", 76 * GIB, ()),
        ("Process 9 has 76.00 GiB memory in use. Process 8 has 1.00 GiB memory in use. ", 76 * GIB, ((8, GIB),)),
        ("Process 9 has 76.00 GiB memory in use. Process 8 has 77.00 GiB memory in use. ", None, ()),
        ("Process 9 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has 76.00 GiB memory in use. ",
         76 * GIB, ((9, 2 * GIB),)),
    ],
    ids=["itself", "itself and another", "one of two", "known"],
)  # fmt: skip
def test_own_memory_in_a_container_is_not_that_of_another_process(
    others: str, used: float | None, holders: tuple[tuple[int, float], ...]
) -> None:
    """The driver's PIDs are those of the host, so PyTorch does not recognize itself."""
    item = only(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB "
        f"of which 1.00 GiB is free. {others}Of the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB is "
        "reserved by PyTorch but unallocated.\n"
    )
    assert (item.used, item.holders) == (used, holders)


@pytest.mark.parametrize(
    "line",
    [
        "INFO the engine is out of practice",
        "Zoom meeting at 10",
        "INFO GPU memory utilization 0.9",
        'INFO: 127.0.0.1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
        "slurmstepd: task/cgroup: job 77 limit",
        "I will not be Killed today, said the hero",
        "INFO cuDNN version CUDNN_STATUS_SUCCESS",
    ],
)
def test_ordinary_line_is_not_a_failure(line: str) -> None:
    assert findings(line + "\n").failures == ()


def test_traceback_is_reduced_to_its_exception() -> None:
    result = findings(
        "start\n(Worker pid=7) ERROR 11-22 21:56:23 [w.py:1] Traceback (most recent call last):\n"
        '(Worker pid=7) ERROR 11-22 21:56:23 [w.py:1]   File "a.py", line 3, in f\n'
        "(Worker pid=7) ERROR 11-22 21:56:23 [w.py:1]     raise KeyError(x)\n"
        "(Worker pid=7) ERROR 11-22 21:56:23 [w.py:1] KeyError: 'x'\n"
        "Traceback (most recent call last):\n"
        '  File "a.py", line 3, in f\n'
        "KeyError: 'x'\nend\n"
    )
    (failure,) = result.failures
    assert (failure.kind, failure.line, failure.text, failure.times) == ("exception", 2, "KeyError: 'x'", 2)
    assert (failure.process, failure.pid, result.lines) == ("Worker", 7, 9)


def test_interleaved_tracebacks_are_separated_by_process() -> None:
    result = findings(
        "(EngineCore_DP0 pid=7) ERROR 11-22 21:56:23 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore_DP1 pid=8) ERROR 11-22 21:56:23 [core.py:1] Traceback (most recent call last):\n"
        '(EngineCore_DP0 pid=7) ERROR 11-22 21:56:23 [core.py:1]   File "a.py", line 3, in f\n'
        '(EngineCore_DP1 pid=8) ERROR 11-22 21:56:23 [core.py:1]   File "a.py", line 3, in f\n'
        "(APIServer pid=6) INFO 11-22 21:56:23 [loggers.py:1] Avg prompt throughput: 1.0 tokens/s\n"
        'INFO:     10.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK\n'
        "NVRM: Xid (PCI:0000:3b:00): 79\n"
        "(EngineCore_DP1 pid=8) ERROR 11-22 21:56:23 [core.py:1] KeyError: 'layer'\n"
        "(EngineCore_DP0 pid=7) ERROR 11-22 21:56:23 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
        "end\n"
    )
    assert [(failure.kind, failure.pid, failure.line) for failure in result.failures] == [
        ("gpu-out-of-memory", 7, 1), ("exception", 8, 2), ("gpu-fault", None, 7),
    ]  # fmt: skip
    assert result.lines == 10


def test_request_logged_within_a_traceback_is_not_its_exception() -> None:
    item = only(
        "Traceback (most recent call last):\n"
        '  File "a.py", line 3, in f\n'
        'INFO:     10.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK\n'
        "INFO 11-22 21:56:23 [engine.py:1] Done: 7\n"
        "    raise IndexError\n"
        "IndexError\n"
    )
    assert item.text == "IndexError"


def test_exceptions_of_a_group_are_failures() -> None:
    result = findings(
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "a.py", line 1, in <module>\n'
        "  | ExceptionGroup: errors (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "a.py", line 1, in f\n'
        "    | MemoryError\n"
        "    +------------------------------------\n"
    )
    assert [failure.kind for failure in result.failures] == ["exception", "host-allocation"]


def test_exception_below_a_framed_traceback_is_a_failure() -> None:
    item = only(
        "╭───── Traceback (most recent call last) ─────╮\n│ a.py:3 in f │\n│ ❱ 3 raise │\n╰─────╯\nValueError: bad\n"
    )
    assert item.text == "ValueError: bad"


def test_failure_after_an_endless_traceback_is_found() -> None:
    frames = '  File "a.py", line 1, in f\n' * 20_000
    text = f"Traceback (most recent call last):\n{frames}RuntimeError: CUDA error: out of memory\n" + "x\n" * 9
    assert only(text).line == 20_002


def test_interruption_by_the_user_is_not_a_failure() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1\nKeyboardInterrupt\n'
    assert findings(text).failures == ()


def test_result_does_not_depend_on_the_blocks() -> None:
    lines = ["x" * 50, "slurmstepd: error: Detected 1 oom_kill event in StepId=5.batch.", "Traceback (most recent call last):",
             '  File "a.py", line 1, in <module>', "ValueError: bad", "é" * 30, "NVRM: Xid (PCI:0000:01:00): 31"]  # fmt: skip
    text = "\n".join(lines * 3) + "\nlast line without end: Segmentation fault"
    whole = findings(text)
    assert [failure.line for failure in whole.failures] == [2, 3, 7, 22]
    for block in (1, 7, 64, 333):
        assert findings(text, block=block) == whole


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_encoding_does_not_matter(encoding: str) -> None:
    text = "Übung größer\nRuntimeError: CUDA error: out of memory\n".encode(encoding)
    assert only(text).line == 2


def test_random_bytes_are_examined_without_error() -> None:
    draw = random.Random(4)  # noqa: S311 - reproducible
    parts = [
        b"CUDA error: out of memory",
        b"Traceback (most recent call last):",
        b"\n",
        b"\r",
        b"\0",
        b"\xff\xfe",
        b"  ",
    ]
    for _ in range(200):
        data = b"".join(draw.choice(parts) if draw.random() < 0.5 else draw.randbytes(9) for _ in range(60))
        result = findings(data, block=17)
        assert result.bytes == len(data)
        assert all(failure.text.isprintable() for failure in result.failures)


def test_progress_bar_in_one_line_does_not_hide_a_failure() -> None:
    bar = "".join(f"\r{percent}%" for percent in range(100))
    item = only(f"{bar}\rRuntimeError: CUDA error: out of memory\n")
    assert item.text == "RuntimeError: CUDA error: out of memory"


def test_lines_that_end_in_carriage_returns_are_separate() -> None:
    result = findings("".join(f"\r{n}%|###| CUDA error: bad {n}" for n in range(3)) + "\r" + "x" * 20_000)
    assert [failure.text for failure in result.failures] == [f"{n}%|###| CUDA error: bad {n}" for n in range(3)]


def test_line_without_end_is_bounded_and_counted() -> None:
    result = findings("CUDA error: out of memory " + "x" * 10_000_000, block=1 << 16)
    assert result.cut_lines >= 1
    assert len(result.failures) == 1
    assert len(result.failures[0].text) <= 600


def test_many_failures_are_bounded_and_counted() -> None:
    result = findings("".join(f"KeyError {n}: CUDA error: out of memory in layer {n}\n" for n in range(1000)))
    assert len(result.failures) == MOST_KEPT + MOST_KEPT // 2
    assert result.dropped == 1000 - len(result.failures)
    assert result.failures[-1].line == 1000


def test_option_for_the_blocks_of_the_cache_is_read() -> None:
    line = "(EngineCore pid=7) INFO [kv_cache_utils.py:1] Overriding num_gpu_blocks=32768 with num_gpu_blocks_override=96\n"
    startup = findings(line).startup
    assert (startup.kv_blocks, startup.kv_blocks_free) == (96, 32768)


def test_startup_figures_are_read() -> None:
    startup = findings(
        "GPU KV cache size: 1,234,567 tokens\nMaximum concurrency for 8,192 tokens per request: 150.70x\n"
    )
    assert startup.startup == crash_log.StartupFacts(1234567, 8192, 150.7)


def test_recorded_engine_that_died_names_its_worker_first(shared_data: Path) -> None:
    data = gzip.decompress((shared_data / "serving/vllm-0.32-cpu-engine-died.log.gz").read_bytes())
    result = findings(data)
    assert result.lines == data.count(b"\n")
    assert [(failure.kind, failure.process) for failure in result.failures] == [
        ("exception", "Worker"), ("exception", "EngineCore"), ("engine-ended", "APIServer"),
    ]  # fmt: skip
    assert result.startup.kv_tokens == 8192


def test_recorded_start_that_was_refused_names_the_length_that_fits(shared_data: Path) -> None:
    result = findings((shared_data / "serving/vllm-0.32-cpu-kv-too-small.log").read_bytes())
    assert [(failure.kind, failure.max_length) for failure in result.failures] == [
        ("kv-cache-too-small", 176),
        ("worker-ended", None),
        ("engine-ended", None),
    ]


def test_recorded_shutdown_is_not_a_failure_of_the_engine(shared_data: Path) -> None:
    """On SIGTERM vLLM also logs an EngineDeadError."""
    data = gzip.decompress((shared_data / "serving/vllm-0.32-cpu-episode-short-prompts.log.gz").read_bytes())
    assert [failure.kind for failure in findings(data).failures][:1] == ["shutdown"]


def test_options_of_the_start_are_read() -> None:
    startup = findings(
        "(APIServer pid=7) INFO 11-22 21:49:48 [api_utils.py:286] non-default args: {'model_tag': 'x', 'model': '/m/x', "
        "'api_key': ['secret'], 'port': 18200, 'enforce_eager': True, 'enable_chunked_prefill': False, "
        "'served_model_name': ['x', 'y z'], 'hf_overrides': {'a': 1}, 'seed': None}"
    ).startup
    assert startup.model == "/m/x"
    assert startup.options == (
        ("--port", "18200"), ("--enforce-eager",), ("--no-enable-chunked-prefill",), ("--served-model-name", "x", "y z"),
        ("--hf-overrides", '{"a": 1}'),
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["{'model': <Model 7>}", "{'a': b'1', 'c': {1, 2}}", "{" * 5000 + "}", "{1}", "{'a': }"]
)
def test_options_that_cannot_be_read_are_unknown(text: str) -> None:
    startup = findings(f"INFO non-default args: {text}").startup
    assert (startup.model, startup.options) == (None, None)
