"""The points of series in JSON of Prometheus, ``"values":[[TIME,"VALUE"],...]``, as columns instead of Python objects.

Nearly all of a response are points. They are taken out of the text, and what is left is decoded as any other JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from slurm_affinode.metrics.readers.lines import pieces, positions

_BEGIN = re.compile(rb'"values":\[\[')
_STAND_IN = "-Infinity"
"""Stands for a list of points; in JSON it is no value."""
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class PointColumns:
    """The points of all series of a text."""

    times: pl.Series
    """In seconds."""
    values: pl.Series
    """As text."""


@dataclass(frozen=True, slots=True)
class SeriesPoints:
    """The points of a series."""

    columns: PointColumns
    start: int
    """The place of the first point in ``columns``."""
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def times(self) -> pl.Series:
        """The times in seconds."""
        return self.columns.times[self.start : self.end]

    @property
    def values(self) -> pl.Series:
        """The values as text."""
        return self.columns.values[self.start : self.end]


def decoded(text: bytes) -> list[Any] | None:
    """Return the documents in ``text`` (UTF-8), one or one per line, with ``SeriesPoints`` in place of lists of pairs.

    None if the text has no such points, or if they or anything else cannot be decoded.
    """
    parts = _parts(text)
    if parts is None:
        return None
    rest, points = parts
    try:
        return [_document(rest, iter(points))]
    except json.JSONDecodeError:
        if not text.isascii():  # which has further line separators
            return None
        point_iterator = iter(points)
        try:
            return [_document(line, point_iterator) for line in rest.splitlines() if line.strip()]
        except (ValueError, RecursionError, StopIteration):
            return None
    except (ValueError, RecursionError):
        return None


def _document(text: str, points: Iterator[SeriesPoints]) -> Any:
    def constant(name: str) -> object:
        return next(points) if name == _STAND_IN else float(name)

    return json.loads(text, strict=False, parse_constant=constant)  # a label value may contain any character


def _parts(text: bytes) -> tuple[str, list[SeriesPoints]] | None:
    """Return the text with ``_STAND_IN`` for the points of each series, and these points."""
    begins = np.array([match.end() for match in _BEGIN.finditer(text)], np.int64)
    if not len(begins):
        return None
    ends = np.array([text.find(b"]]", begin) for begin in begins.tolist()], np.int64)
    if (ends < begins).any() or (ends[:-1] > begins[1:]).any():
        return None
    columns, counts = _columns(text, begins, ends) or (None, None)
    if columns is None or counts is None:
        return None
    kept_spans = zip([0, *(ends + 2).tolist()], [*(begins - 2).tolist(), len(text)], strict=True)
    rest = [text[start:end].decode() for start, end in kept_spans]
    if any(_STAND_IN in part for part in rest):
        return None
    last = np.cumsum(counts)
    spans = zip((last - counts).tolist(), last.tolist(), strict=True)
    return _STAND_IN.join(rest), [SeriesPoints(columns, start, end) for start, end in spans]


def _columns(
    text: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[PointColumns, NDArray[np.int64]] | None:  # fmt: skip
    """Return the points between ``begins`` and ``ends``, and how many each series has; None if any has another form."""
    characters, every = np.frombuffer(text, np.uint8), positions(text, b'"')
    first, last = np.searchsorted(every, begins), np.searchsorted(every, ends)
    counts = last - first
    if (counts % 2).any() or not counts.all():
        return None
    counts //= 2
    quotes = np.concatenate([every[start:end] for start, end in zip(first.tolist(), last.tolist(), strict=True)])
    opening, closing = quotes[::2], quotes[1::2]
    final = np.cumsum(counts) - 1
    inner = np.ones(len(closing), np.bool_)
    inner[final] = False
    starts = np.empty(len(opening), np.int64)
    starts[1:] = closing[:-1] + 4  # after "],[
    starts[np.append(0, final[:-1] + 1)] = begins
    sound = (
        (characters[opening - 1] == ord(",")).all()
        and (characters[closing + 1] == ord("]")).all()
        and (closing[final] + 1 == ends).all()
        and (characters[closing[inner] + 2] == ord(",")).all()
        and (characters[closing[inner] + 3] == ord("[")).all()
        and (starts < opening - 1).all()
    )
    if not sound:
        return None
    special = np.flatnonzero((characters < ord(" ")) | (characters == ord("\\")))
    if len(special) and (np.searchsorted(special, begins) != np.searchsorted(special, ends)).any():
        return None
    times, values = pieces(text, (starts, opening - 1), (opening + 1, closing))
    whole = times.cast(pl.Int64, strict=False)
    digits = characters[starts] - ord("1") < 9  # the difference is unsigned
    if whole.has_nulls() or not digits.all():
        if not times.str.contains(_NUMBER).all():
            return None
        return PointColumns(times.cast(pl.Float64, strict=False), values), counts
    return PointColumns(whole.cast(pl.Float64), values), counts


def joined(points: Sequence[SeriesPoints]) -> PointColumns | None:
    """Return the points of several series; None if they do not follow each other."""
    follow = all(before.end == after.start for before, after in pairwise(points))
    if not follow or any(each.columns is not points[0].columns for each in points):
        return None
    columns, start, end = points[0].columns, points[0].start, points[-1].end
    return PointColumns(columns.times[start:end], columns.values[start:end])
