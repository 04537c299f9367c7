"""Runs a target: a million inputs, each refused or accepted within a time limit, and nothing else may come of any.

Each target runs in a child process. A failure is whatever is neither: an exception of another type than the declared
ones, an invariant of what was accepted that does not hold, a time limit that is passed, memory, descriptors or threads
that are not given back, and the end of the process. Its input is written to a file, which can be run again.
"""

from __future__ import annotations

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
"""Whether an input was accepted. Raises one of the target's ``refusals`` where it was not."""

MEMORY_LIMIT = 2 << 30
"""Address space that a target may take, in bytes, beyond what it begins with."""
GROWTH_LIMIT = 48 << 20
"""Resident memory that a target may take after its first inputs, in bytes."""
SETTLE_S = 10.0
"""Threads and descriptors have so long to go when the inputs are over."""
STUCK_S = 60.0
"""A child that has not come to its next input by then is ended."""
MOST_FAILURES = 5
_LOOK_EVERY = 4096
_WARM = 2000
"""Inputs after which memory is measured first: caches are full by then."""


class Wrong(Exception):  # noqa: N818 - names what is the case
    """What was accepted is not what the input says, or a refusal is not as it is declared."""


class Hang(BaseException):
    """An input took longer than its limit. Not an ``Exception``, so that no code under test takes it for its own."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed, and how."""

    name: str
    about: str
    generate: Callable[[Random], bytes]
    session: Callable[[], AbstractContextManager[Check]]
    """Sets up what is needed once, and takes it down."""
    refusals: tuple[type[Exception], ...] = ()
    limit_s: float = 5.0
    """For one input."""
    fed: Callable[[], str | None] = lambda: None
    """Why it cannot run here; ``None``: it can."""
    whole: Callable[[int, int], Outcome] | None = None
    """Runs a number of inputs of a seed by itself, in place of all of the above."""


@dataclass
class Failure:
    """An input, and what came of it."""

    index: int
    data: bytes
    what: str


@dataclass
class Outcome:
    """Of one target."""

    target: str
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    took_s: float = 0.0
    skipped: str | None = None
    failures: list[Failure] = field(default_factory=list)

    def as_json(self) -> str:
        """One line."""
        return json.dumps(
            asdict(self) | {"failures": [asdict(one) | {"data": one.data.hex()} for one in self.failures]}
        )

    @classmethod
    def of_json(cls, line: str) -> Outcome:
        """From such a line."""
        value = json.loads(line)
        failures = [Failure(one["index"], bytes.fromhex(one["data"]), one["what"]) for one in value.pop("failures")]
        return cls(**value, failures=failures)


def inputs(target: Target, seed: int, first: int = 0) -> Iterator[bytes]:
    """The inputs of a seed, from a number on. The recorded ones come first, and have numbers below 0."""
    if not first:
        yield from (path.read_bytes() for path in sorted((CORPUS / target.name).glob("*")))
    rng = Random()  # noqa: S311 - the same inputs for the same seed
    index = first
    while True:
        rng.seed(seed << 40 | index)
        yield target.generate(rng)
        index += 1


def run(target: Target, count: int, seed: int, progress: Callable[[int], None] = lambda index: None) -> Outcome:
    """Run ``count`` inputs and the recorded ones, in this process."""
    recorded = len(list((CORPUS / target.name).glob("*")))
    wanted = count + recorded
    return _run(target, islice(inputs(target, seed), wanted), -recorded, progress)


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
    signal.signal(signal.SIGALRM, _late)
    began = time.monotonic()
    index, data = first, b""
    with target.session() as check:
        for index, data in enumerate(source, first):
            progress(index)
            signal.setitimer(signal.ITIMER_REAL, target.limit_s)
            try:
                accepted = check(data)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except target.refusals:
                signal.setitimer(signal.ITIMER_REAL, 0)
                accepted = False
            except (Exception, Hang) as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
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
                if _resident() > held + GROWTH_LIMIT:
                    gc.collect()
                    if _resident() > held + GROWTH_LIMIT:
                        what = f"memory has grown from {held >> 20} to {_resident() >> 20} MiB"
                        outcome.failures.append(Failure(index, data, what))
                        break
    outcome.took_s = time.monotonic() - began
    lost = _left_over(before)
    if lost is not None:
        outcome.failures.append(Failure(index, data, lost))
    return outcome


def _late(number: int, frame: FrameType | None) -> None:
    raise Hang("the input took longer than its time limit")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _held_by_process() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _left_over(before: tuple[int, int]) -> str | None:
    """Descriptors and threads that are there now and were not before."""
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
    """The same in a child process, with a limit on its memory; how that ends is an outcome as well."""
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
    """How it ended; one that stands still is ended."""
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
