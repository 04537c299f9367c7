"""Runs a target: a million inputs, each of which must be refused or accepted within a time limit.

Each target runs in a child process. Anything else is a failure: an exception of an undeclared type, a violated
invariant of accepted input, an exceeded time limit, leaked memory, descriptors or threads, and the end of the process.
The input of a failure is written to a file, from which it can be run again.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from types import FrameType

CORPUS = Path(__file__).parent / "corpus"
Check = Callable[[bytes], bool]
"""Returns whether an input was accepted. Raises one of the target's ``refusals`` if it was not."""

MEMORY_LIMIT = 2 << 30
"""Address space that a target may allocate beyond its initial size, in bytes."""
GROWTH_LIMIT = 48 << 20
"""Resident memory that a target may gain after its first inputs, in bytes."""
MEMORY_SETTLE_S = 2.0
"""Time for memory to be released before it counts as grown, in seconds."""
SETTLE_S = 10.0
"""Time for threads to end and descriptors to be closed after the last input, in seconds."""
WAITS = 12
STUCK_S = 60.0
"""Time after which a child that has not reached its next input is killed, in seconds."""
MOST_FAILURES = 5
_LOOK_EVERY = 4096
_WARM = 2000
"""Inputs before the first memory measurement: caches are full by then."""


class Wrong(Exception):  # noqa: N818 - names what is the case
    """Accepted data does not match the input, or a refusal is not as declared."""


class Hang(BaseException):
    """An input exceeded its time limit. Not an ``Exception``, so that no code under test catches it."""


@dataclass(frozen=True)
class Target:
    """A function under test, and its inputs."""

    name: str
    about: str
    generate: Callable[[Random], bytes]
    session: Callable[[], AbstractContextManager[Check]]
    """Sets up shared resources, and removes them."""
    refusals: tuple[type[Exception], ...] = ()
    limit_s: float = 5.0
    """CPU time per input, in seconds; one that waits gets ``WAITS`` times as long, and at most ``STUCK_S``."""
    fed: Callable[[], str | None] = lambda: None
    """Returns the reason why it cannot run here; ``None``: it can."""
    whole: Callable[[int, int], Outcome] | None = None
    """Runs a number of inputs of a seed itself, instead of the fields above."""


@dataclass
class Failure:
    """An input and its failure."""

    index: int
    data: bytes
    what: str


@dataclass
class Outcome:
    """Results of one target."""

    target: str
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    took_s: float = 0.0
    skipped: str | None = None
    failures: list[Failure] = field(default_factory=list)

    def as_json(self) -> str:
        """Return the outcome as one line of JSON."""
        return json.dumps(
            asdict(self) | {"failures": [asdict(failure) | {"data": failure.data.hex()} for failure in self.failures]}
        )

    @classmethod
    def of_json(cls, line: str) -> Outcome:
        """Return the outcome from such a line."""
        value = json.loads(line)
        failures = [Failure(row["index"], bytes.fromhex(row["data"]), row["what"]) for row in value.pop("failures")]
        return cls(**value, failures=failures)


def inputs(target: Target, seed: int, first: int = 0) -> Iterator[bytes]:
    """Yield the inputs of a seed, beginning with a number. Recorded inputs come first, with numbers below 0."""
    if not first:
        yield from (path.read_bytes() for path in sorted((CORPUS / target.name).glob("*")))
    rng = Random()  # noqa: S311 - the same inputs for the same seed
    index = first
    while True:
        rng.seed(seed << 40 | index)
        yield target.generate(rng)
        index += 1


def run(target: Target, count: int, seed: int, progress: Callable[[int], None] = lambda index: None) -> Outcome:
    """Run ``count`` inputs and the recorded ones in this process."""
    recorded = len(list((CORPUS / target.name).glob("*")))
    total = count + recorded
    return _run(target, islice(inputs(target, seed), total), -recorded, progress)


def replay(target: Target, data: bytes) -> Outcome:
    """Run one input."""
    return _run(target, iter([data]), 0, lambda index: None)


def _run(target: Target, source: Iterator[bytes], first: int, progress: Callable[[int], None]) -> Outcome:
    outcome = Outcome(target.name, skipped=target.fed())
    if outcome.skipped is not None:
        return outcome
    seen: set[str] = set()
    held: int | None = None
    before = _held_by_process()
    limit = _Limit(target.limit_s)
    began = time.monotonic()
    index, data = first, b""
    with target.session() as check:
        for index, data in enumerate(source, first):
            progress(index)
            limit.start()
            try:
                accepted = check(data)
                limit.stop()
            except target.refusals:
                limit.stop()
                accepted = False
            except (Exception, Hang) as error:
                limit.stop()
                what = "".join(traceback.format_exception(error))
                where = type(error).__name__ + str(traceback.extract_tb(error.__traceback__)[-1])
                if where not in seen:
                    seen.add(where)
                    outcome.failures.append(Failure(index, data, what))
                if len(outcome.failures) >= MOST_FAILURES:
                    break
                continue
            outcome.inputs += 1
            if accepted:
                outcome.accepted += 1
            else:
                outcome.refused += 1
            if outcome.inputs % _LOOK_EVERY == 0 and outcome.inputs > _WARM:
                held = _resident() if held is None else held
                if _resident() > held + GROWTH_LIMIT and (grown := _settled()) > held + GROWTH_LIMIT:
                    what = f"memory has grown from {held >> 20} to {grown >> 20} MiB"
                    outcome.failures.append(Failure(index, data, what))
                    break
    outcome.took_s = time.monotonic() - began
    lost = _left_over(before)
    if lost is not None:
        outcome.failures.append(Failure(index, data, lost))
    return outcome


class _Limit:
    """Stops an input that takes too much CPU time, or waits for too long: others may be using the CPUs."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s, self._waits_s = cpu_s, min(WAITS * cpu_s, STUCK_S)
        self._cpu = self._clock = 0.0
        signal.signal(signal.SIGALRM, self._late)

    def start(self) -> None:
        """Begin an input."""
        self._cpu, self._clock = time.process_time(), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self._cpu_s, self._cpu_s)

    def stop(self) -> None:
        """End the input."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _late(self, number: int, frame: FrameType | None) -> None:
        if time.process_time() - self._cpu >= self._cpu_s or time.monotonic() - self._clock >= self._waits_s:
            raise Hang("the input took longer than its time limit")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _settled() -> int:
    """Return the smallest resident memory within some time: a server may still hold connections of earlier inputs.

    Memory that was freed and that glibc keeps for the next allocations does not count (malloc_trim(3)).
    """
    result, deadline = _resident(), time.monotonic() + MEMORY_SETTLE_S
    libc = ctypes.CDLL(None)
    while time.monotonic() < deadline:
        gc.collect()
        libc.malloc_trim(0)
        result = min(result, _resident())
        time.sleep(0.1)
    return result


def _held_by_process() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _left_over(before: tuple[int, int]) -> str | None:
    """Return a description of new descriptors and threads, or ``None``."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        now = _held_by_process()
        if now <= before and now[1] <= before[1]:
            return None
        if time.monotonic() > deadline:
            return f"left open: {now[0] - before[0]} descriptors, {now[1] - before[1]} threads"
        time.sleep(0.01)


def run_apart(target: Target, count: int, seed: int) -> Outcome:
    """Run the inputs in a child process with limited memory; its abnormal end is a failure as well."""
    if target.whole is not None:
        return target.whole(count, seed)
    counter = mmap.mmap(-1, 16)
    answer = os.memfd_create("outcome")
    child = os.fork()
    if child == 0:
        _in_child(target, count, seed, counter, answer)
    ended = _wait(child, counter)
    with os.fdopen(answer, "rb") as file:
        file.seek(0)
        line = file.read()
    if line:
        return Outcome.of_json(line.decode())
    (index,) = struct.unpack_from("q", counter, 0)
    data = next(inputs(target, seed, index)) if index > 0 else b""
    return Outcome(target.name, inputs=index, failures=[Failure(index, data, f"the process ended: {ended}")])


def _in_child(target: Target, count: int, seed: int, counter: mmap.mmap, answer: int) -> None:
    status = 1
    try:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_LIMIT, resource.RLIM_INFINITY))

        def progress(index: int) -> None:
            struct.pack_into("q", counter, 0, index)

        line = run(target, count, seed, progress).as_json().encode()
        with os.fdopen(answer, "wb") as file:
            file.write(line)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(child: int, counter: mmap.mmap) -> str:
    """Wait for the child and return how it ended; a child that makes no progress is killed."""
    seen, since = b"", time.monotonic()
    pause = 0.002
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return f"signal {-code}" if code < 0 else f"status {code}"
        if counter[:8] != seen:
            seen, since = counter[:8], time.monotonic()
        elif time.monotonic() - since > STUCK_S + SETTLE_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"it stood still for {STUCK_S:g} s"
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)
