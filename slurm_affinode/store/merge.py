"""What becomes of a record that is seen again: pure, on frames in stored form.

A run goes forward only: pending, running, ended. Of two records of one run the later stage wins, and of two at the
same stage the one taken in last (of two running ones, the one with the longer elapsed time). The winner's values are
kept; what it does not say is filled from the other, so a smaller field set erases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

TRANSIENT = ("array_spec", "reason")
"""What is true of one stage only: why a job waits, which array tasks wait with it. Not carried to a later stage."""

_STAGE = 1 << 40  # above any elapsed time in seconds
_OLD = "\N{LEFTWARDS ARROW}"  # suffix of the columns of the store; no schema has such a name
_SEEN = "seen" + _OLD


@dataclass(frozen=True, slots=True)
class Merged:
    """The outcome: rows to write, and how many of which kind there were."""

    write: pl.DataFrame
    """New and changed rows, whole."""
    new: int
    updated: int
    unchanged: int


def merge(incoming: pl.DataFrame, existing: pl.DataFrame, key: Sequence[str]) -> Merged:
    """Merge ``incoming`` (any number of records of a run) into ``existing`` (at most one); same columns in both."""
    single = collapse(incoming, key)
    if existing.is_empty():
        return Merged(single, single.height, 0, incoming.height - single.height)
    values = [name for name in incoming.columns if name not in key]
    joined = single.join(
        existing.with_columns(pl.lit(1, pl.Int8).alias(_SEEN)), on=list(key), how="left", suffix=_OLD,
        maintain_order="left",
    )  # fmt: skip
    wins = _order(values) >= _order(values, _OLD)
    surpasses = _stage(values) > _stage(values, _OLD)
    seen = pl.col(_SEEN).is_not_null()
    merged = joined.select(
        *key,
        *(_value(name, wins, surpasses, seen).alias(name) for name in values),
        seen.alias(_SEEN),
        pl.any_horizontal(
            pl.lit(False), *(_value(name, wins, surpasses, seen).ne_missing(pl.col(name + _OLD)) for name in values)
        )
        .and_(seen)
        .alias("changed" + _OLD),
    )
    new = merged.height - int(merged.get_column(_SEEN).sum())
    updated = int(merged.get_column("changed" + _OLD).sum())
    to_write = merged.filter(~pl.col(_SEEN) | pl.col("changed" + _OLD)).select(incoming.columns)
    return Merged(to_write, new, updated, incoming.height - new - updated)


def collapse(frame: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """One row per key, by the same rule; a frame without repeated keys comes back as it is."""
    repeated = frame.select(pl.struct(key).is_duplicated().alias("repeated")).get_column("repeated")
    if not repeated.any():
        return frame
    values = [name for name in frame.columns if name not in key]
    again = frame.filter(repeated).unique(maintain_order=True).sort(_order(values), maintain_order=True)
    last = [pl.col(name).last() if name in TRANSIENT else pl.col(name).drop_nulls().last() for name in values]
    return pl.concat([frame.filter(~repeated), again.group_by(list(key), maintain_order=True).agg(last)])


def _stage(values: Sequence[str], suffix: str = "") -> pl.Expr:
    """2 ended, 1 running, 0 pending."""
    if "end" not in values:
        return pl.lit(0)
    ended, started = pl.col("end" + suffix).is_not_null(), pl.col("start" + suffix).is_not_null()
    return pl.when(ended).then(2).when(started).then(1).otherwise(0)


def _order(values: Sequence[str], suffix: str = "") -> pl.Expr:
    stage = _stage(values, suffix)
    if "elapsed_s" not in values:
        return stage
    elapsed = pl.when(stage == 1).then(pl.col("elapsed_s" + suffix).fill_null(0)).otherwise(0)
    return stage.cast(pl.Int64) * _STAGE + elapsed


def _value(name: str, wins: pl.Expr, surpasses: pl.Expr, seen: pl.Expr) -> pl.Expr:
    new, old = pl.col(name), pl.col(name + _OLD)
    won = pl.when(surpasses).then(new).otherwise(pl.coalesce(new, old)) if name in TRANSIENT else pl.coalesce(new, old)
    lost = old if name in TRANSIENT else pl.coalesce(old, new)
    return pl.when(~seen | wins).then(won).otherwise(lost)
