"""The C code of plugin, shepherd and libraries under sanitizers, and the grammar of the option in both languages."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from fuzz.mutation import mutated, some
from fuzz.runner import Check, Failure, Outcome, Target, Wrong
from slurm_affinode.core.wake_time import wake_time
from slurm_affinode.model.suspension import SuspendOption

SPANK = Path(__file__).parents[2] / "spank"
BUILD = SPANK.parent / "out" / "fuzz-spank"
_KINDS = ("message", "option", "cgroup", "settings", "arguments", "channel")
_INPUTS_PER_S = 2000
"""The minimum speed, for the time limit."""


@functools.cache
def _missing() -> str | None:
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None


@functools.cache
def _program() -> Path:
    """Build the C fuzzer and return its path. Raises ``Wrong``."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:  # several test workers may build at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        argv = ("make", "-s", "-C", str(SPANK), f"BUILD={BUILD}", "fuzz")
        built = subprocess.run(argv, check=False, capture_output=True, text=True)
    if built.returncode != 0:
        raise Wrong(built.stderr[-2000:])
    return BUILD / "sanitized" / "fuzz"


PACKAGE = SPANK.parent / "slurm_affinode"
_WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Werror")
_SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


@functools.cache
def _library_program(name: str, directory: str, *flags: str) -> Path:
    """Build the fuzzer ``name`` of the C files in a directory of the package; return its path. Raises ``Wrong``.

    Overflow of integers, which wraps in the library, ends it.
    """
    program = SPANK.parent / "out" / f"fuzz-{name}" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    with (program.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = PACKAGE / directory
        sources = (str(Path(__file__).with_name(f"{name}.c")), *map(str, sorted(library.glob("*.c"))))
        argv = ("gcc", "-std=c11", *_WARNINGS, *_SANITIZE, *flags, f"-I{library}", "-o", str(program), *sources)
        built = subprocess.run(argv, check=False, capture_output=True, text=True)
    if built.returncode != 0:
        raise Wrong(built.stderr[-2000:])
    return program


def _run(kind: str, count: int, seed: int, program: Callable[[], Path] = _program) -> Outcome:
    """Run a C fuzzer on one kind of input."""
    outcome = Outcome(f"c-{kind}", skipped=_missing())
    if outcome.skipped is not None:
        return outcome
    try:
        argv = (str(program()), kind, str(count), str(seed))
        began = time.monotonic()
        ran = subprocess.run(
            argv, check=False, capture_output=True, text=True, errors="replace", timeout=240 + count / _INPUTS_PER_S
        )
    except (Wrong, subprocess.TimeoutExpired) as error:
        outcome.failures.append(Failure(0, b"", str(error)))
        return outcome
    outcome.took_s = time.monotonic() - began
    if ran.returncode == 0:
        outcome.refused, outcome.accepted = map(int, ran.stdout.split())
        outcome.inputs = outcome.refused + outcome.accepted
        return outcome
    at = [int(number) for number in re.findall(r"^at (\d+)$", ran.stderr, re.MULTILINE)]
    messages = "\n".join(line for line in ran.stderr.splitlines() if not line.startswith("at "))
    again = (
        f"it ended with {ran.returncode} within 1024 inputs from {at[-1] if at else 0}: {' '.join(argv)}\n"
        f"{messages[:4000]}"
    )
    outcome.failures.append(Failure(at[-1] if at else 0, " ".join(argv).encode(), again))
    return outcome


# --- option


class _Option(ctypes.Structure):
    _fields_ = (
        ("window_s", ctypes.c_uint32),
        ("util_centi", ctypes.c_uint32),
        ("mode", ctypes.c_int),
        ("when", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("after_loss", ctypes.c_int),
        ("wake", ctypes.c_char * 32),
        ("signal", ctypes.c_char * 12),
        ("before_s", ctypes.c_uint32),
        ("io_uring", ctypes.c_bool),
    )


_SEEDS = (
    b"15m,util=2.5,mode=inplace,wake=auto,when=always,signal=USR1@60",
    b"1-02:03:04",
    b"90s,wake=2030-12-31T18:30:59",
    b"2h,wake=now+2hours",
    b"10:00,wake=8:30",
    b"5,wake=2024-02-29",
    b"1d,util=33.33%",
    b"60s,wake=teatime,signal=SIGPWR@0",
    b"1h,steps=local,when=always",
    b"1h,after_loss=hold",
)
_WORDS = (
    b"now+",
    b"days",
    b"wake=",
    b"util=",
    b"signal=",
    b"steps=",
    b"after_loss=",
    b"SIG",
    b"@",
    b"T24:00",
    b"2023-02-29",
    b"99:99",
    b"0.01",
    b"100",
    b"s",
    b"m",
)


@contextlib.contextmanager
def _parity() -> Iterator[Check]:
    """The agent reads a value formatted by the plugin with the same meaning."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        library = Path(place) / "option.so"
        sources = [str(SPANK / name) for name in ("option.c", "time_span.c", "wake_time.c")]
        argv = (
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-std=c11",
            "-D_GNU_SOURCE",
            f"-I{SPANK}",
            "-o",
            str(library),
            *sources,
        )
        subprocess.run(argv, check=True)
        spank = ctypes.CDLL(str(library))
        spank.option_parse.restype = ctypes.c_bool
        builtin = _Option.in_dll(spank, "option_builtin")
        error, formatted = ctypes.create_string_buffer(512), ctypes.create_string_buffer(160)
        option = _Option()

        def check(data: bytes) -> bool:
            value = data.replace(b"\0", b"")
            if not spank.option_parse(value, ctypes.byref(builtin), ctypes.byref(option), error, ctypes.c_size_t(512)):
                return False
            spank.option_format(ctypes.byref(option), formatted, ctypes.c_size_t(160))
            text = formatted.value.decode("ascii")
            parsed = SuspendOption.parse(text)
            signal = None if parsed.signal is None else (parsed.signal.name, parsed.signal.before_s)
            python_fields = (
                parsed.window_s,
                round(parsed.util_pct * 100),
                parsed.mode.value,
                parsed.when.value,
                parsed.wake,
                signal,
                parsed.steps.value,
                "site" if parsed.after_loss is None else parsed.after_loss.value,
            )
            its = (
                option.window_s,
                option.util_centi,
                ("requeue", "inplace")[option.mode],
                ("pressure", "always")[option.when],
                option.wake.decode(),
                (option.signal.decode(), option.before_s) if option.signal else None,
                ("slurm", "local")[option.steps],
                ("site", "image", "start", "hold")[option.after_loss],
            )
            if python_fields != its:
                raise Wrong(f"{text}: {python_fields} is not {its}")
            if parsed.wake not in ("auto", "hold"):
                wake_time(parsed.wake, 1700000000.0)
            return True

        yield check


def _value(rng: Random) -> bytes:
    return mutated(rng, some(rng, _SEEDS), _WORDS, 300)


def _whole(kind: str) -> Callable[[int, int], Outcome]:
    return functools.partial(_run, kind)


TARGETS = (
    *(
        Target(
            f"c-{kind}",
            f"spank: {kind}, under ASan and UBSan",
            lambda rng: b"",
            contextlib.nullcontext,
            whole=_whole(kind),
        )  # type: ignore[arg-type]
        for kind in _KINDS
    ),
    Target(
        "c-join",
        "samples and cells in the fold of reports, under ASan and UBSan",
        lambda rng: b"",
        contextlib.nullcontext,
        whole=functools.partial(_run, "join", program=functools.partial(_library_program, "join", "analysis/join")),
    ),  # type: ignore[arg-type]
    Target(
        "c-columns",
        "lines and columns of text, under ASan and UBSan",
        lambda rng: b"",
        contextlib.nullcontext,
        whole=functools.partial(
            _run,
            "columns",
            program=functools.partial(_library_program, "columns", "base/columns", "-DPART_BYTES=64"),
        ),
    ),  # type: ignore[arg-type]
    Target("option-parity", "--gpu-suspend-idle in C, and what the agent reads of it", _value, _parity, fed=_missing),
)
