"""Compaction: the parts of a day become one, range of devices by range, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from slurm_affinode.history import devices as device_table
from slurm_affinode.history.manifest import PartEntry
from slurm_affinode.history.merge import merge
from slurm_affinode.history.partfiles import PartFiles, read_devices
from slurm_affinode.history.parts import PartWriter, concat, read_rows
from slurm_affinode.history.schema import IDENTITY

ROWS_AT_ONCE = 2_000_000


def needed(parts: Sequence[PartFiles]) -> bool:
    """Whether the parts of a day are not yet one part whose devices are all told apart."""
    return len(parts) > 1 or bool(parts and device_table.adoptions(read_devices(parts[0])))


def compact(parts: Sequence[PartFiles], target: PartFiles, name: str, *, rows_at_once: int = ROWS_AT_ONCE) -> PartEntry:
    """Write ``target`` from ``parts`` (in the order of reading) by the merge rule and return its entry."""
    slices = _slices(parts)
    identities = device_table.merged_identities(slices.select(pl.col("to").alias("device"), *_without_device()))
    with PartWriter(target, name, identities) as writer:
        for group in _ranges(slices, rows_at_once):
            writer.write(merge(concat(_read(parts, group))))
    return writer.entry


def _without_device() -> list[str]:
    return list(IDENTITY)


def _slices(parts: Sequence[PartFiles]) -> pl.DataFrame:
    """Where each device's rows are: ``part``, ``device``, ``start``, ``rows``, and the device ``to`` which they go."""
    tables = [
        read_devices(files).with_columns(
            pl.lit(number, dtype=pl.Int64).alias("part"), (pl.col("rows").cum_sum() - pl.col("rows")).alias("start")
        )
        for number, files in enumerate(parts)
    ]
    table = pl.concat(tables)
    adopted = device_table.adoptions(table)
    renamed = pl.col("device").replace_strict(
        list(adopted), list(adopted.values()), default=pl.col("device"), return_dtype=pl.UInt64
    )
    return table.with_columns((renamed if adopted else pl.col("device")).alias("to"))


def _ranges(slices: pl.DataFrame, rows_at_once: int) -> Iterator[pl.DataFrame]:
    """Split into groups of whole devices, ascending, of about ``rows_at_once`` rows or one device."""
    totals = slices.group_by("to").agg(pl.col("rows").sum()).sort("to")
    number = ((totals["rows"].cum_sum() - 1) // rows_at_once).alias("range")
    tagged = slices.join(totals.select("to", number), on="to")
    for _, group in tagged.sort("range", "part", "start").group_by("range", maintain_order=True):
        yield group


def _read(parts: Sequence[PartFiles], group: pl.DataFrame) -> Iterator[pl.DataFrame]:
    for (number,), rows in group.group_by("part", maintain_order=True):
        end = rows["start"] + rows["rows"]
        run = (rows["start"] != end.shift()).fill_null(value=True).cum_sum()
        runs = rows.group_by(run.alias("run"), maintain_order=True).agg(pl.col("start").first(), pl.col("rows").sum())
        renamed = rows.filter(pl.col("device") != pl.col("to"))
        for start, length in runs.select("start", "rows").iter_rows():
            frame = read_rows(parts[int(number)].samples, start, length)
            if len(renamed):
                frame = frame.with_columns(
                    pl.col("device").replace_strict(
                        renamed["device"], renamed["to"], default=pl.col("device"), return_dtype=pl.UInt64
                    )
                )
            yield frame
