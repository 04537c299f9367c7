"""Results of tasks, read back from files that others may have written."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import polars as pl

from fuzz.mutation import mutated, some
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.analysis.join.kernel import Folded
from slurm_affinode.model.finding import Evidence
from slurm_affinode.model.serving import EngineKey
from slurm_affinode.pipeline import partial_results, task_values

_NUMBERS = tuple(struct.pack("<q", number) for number in (-1, 0, 1, 8, 255, 1 << 31, 1 << 62, -(1 << 63)))
_HEADS = tuple(tag + number for tag in (b"[", b"(", b"{", b"<", b"A", b"F", b"b", b"s", b"O") for number in _NUMBERS)
_ARRAY_TYPES = ("|b1", "|i1", "|u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "|O", "<M8[s]")
_WORDS = (
    *_NUMBERS, *_HEADS, b"N", b"T", b"U", b"g", b"S", b"F", b"D", b"E", b"t", b"p", b"I",
    *(task_values.encoded(name) for name in _ARRAY_TYPES),
    *(task_values.encoded(str(kind)) for kind in (pl.String(), pl.Boolean(), pl.UInt64(), pl.Float32(), pl.Date())),
    *(task_values.encoded(value) for value in (2**63, 10**30, "9" * 5000, float("nan"), b"", (), {}, np.zeros(3))),
    b"slurm_affinode.analysis.join.kernel.Folded", b"builtins.eval",
)  # fmt: skip


@cache
def _values() -> tuple[bytes, ...]:
    moment = datetime(2026, 11, 2, 3, 4, 5, tzinfo=UTC)
    frame = pl.DataFrame(
        {"job": ["å", None, ""], "time": [moment, None, moment], "day": [None, date(2026, 1, 1), None],
         "busy": [True, None, False], "device": [1, 2, None], "power": [1.5, None, float("nan")]},
        schema_overrides={"device": pl.UInt64(), "power": pl.Float32()},
    )  # fmt: skip
    ints, sums = np.arange(4), np.ones((4, 3))
    folded = Folded(ints, sums, ints.astype(np.int32), ints, sums, ints, np.zeros((2, 4), np.int64), 1, 2, 3)
    key = EngineKey("c", "n", "a:1", "vllm", None)
    evidence = Evidence("memory", 95.0, "%", None, 0.5, "x", met=True)
    values: tuple[Any, ...] = (
        folded, frame, {key: [evidence, None]}, (frame.head(0), {"a": (1, 2.5, np.float64(0.1))}),
        [timedelta(days=-1, microseconds=7), Path("/a"), frozenset({1, 2}), moment.date(), 10**30, b"\0", np.bool_(1)],
    )  # fmt: skip
    return tuple(map(task_values.encoded, values))


def _result(rng: Random) -> bytes:
    if rng.random() < 0.01:
        return some(rng, (b"[", b"(", b"g")) * some(rng, (1, 8)) + struct.pack("<q", 1) * some(rng, (1, 1000))
    if rng.random() < 0.02:
        return b"".join(some(rng, (b"[", b"(")) + struct.pack("<q", 1) for _ in range(some(rng, (10, 3000)))) + b"N"
    return mutated(rng, some(rng, _values()), _WORDS)


@contextlib.contextmanager
def _results() -> Iterator[Check]:
    """A value that is accepted has bytes, and these have the same value."""

    def check(data: bytes) -> bool:
        value = task_values.decoded(data, partial_results.RESULTS)
        content = task_values.encoded(value)
        if task_values.encoded(task_values.decoded(content, partial_results.RESULTS)) != content:
            raise Wrong("the bytes of the value have another value")
        return True

    yield check


def _begin() -> None:
    """Let Polars open the descriptors that it opens with its first queries."""
    for content in _values():
        task_values.decoded(content, partial_results.RESULTS)


TARGETS = (
    Target(
        "task-result", "results of tasks that an interrupted command left", _result, _results, (ValueError,), fed=_begin
    ),
)
