"""GPU slots of nodes: which devices of the metrics are one GPU, and which of them counts at a time.

The devices of a slot are a GPU and its replacements, one after the other, and names of these without a UUID, which
another source gives them.
"""

from __future__ import annotations

import polars as pl

from slurm_affinode.analysis.segments import FAR

PERIODS = {"at": pl.Int64(), "from_ms": pl.Int64(), "to_ms": pl.Int64()}
"""A row of the device table and a half-open period."""


def of_devices(every: pl.DataFrame) -> pl.DataFrame:
    """Return ``at``, ``place``, ``slot`` of each device. A replacement GPU has the slot of its predecessor.

    The place is the PCI address, else the index, else the UUID. Two UUIDs sampled at the same time are two GPUs, even
    if the metrics give them the same index, as happens when indices shift after the loss of a GPU.
    """
    where = ["cluster", "node"]
    by_index = (
        every.drop_nulls(["pci", "index"])
        .group_by(*where, "index")
        .agg(pl.col("pci").unique())
        .filter(pl.col("pci").list.len() == 1)
        .select(*where, "index", pl.col("pci").list.first().alias("there"))
    )
    text = pl.col("index").cast(pl.String)
    placed = every.join(by_index, on=[*where, "index"], how="left", nulls_equal=True, maintain_order="left")
    placed = placed.with_columns(
        pl.coalesce("pci", "there", pl.format("#{}", text), "uuid", pl.format("?{}", "at")).alias("place")
    )
    group = [*where, "place", "mig"]
    last_before = pl.col("last").cum_max().shift().over(group, order_by="first")
    at_once = (last_before >= pl.col("first")).fill_null(value=False).any().over(group)
    # Few places have had several devices, and windows over all of them would take ten times as long.
    named = placed.drop_nulls("uuid")
    simultaneous = (
        named.filter(pl.struct(group).is_duplicated()).filter(at_once).select("at", pl.col("at").alias("own"))
    )
    placed = placed.join(simultaneous, on="at", how="left", maintain_order="left")
    return placed.select("at", "place", pl.struct("place", "mig", "own").alias("slot"))


def twins(table: pl.DataFrame) -> pl.DataFrame:
    """Return ``at``, ``other``, ``from_ms``, ``to_ms``: devices that a better name stands for in this period.

    ``table``: ``at``, the columns of ``DEVICES`` and a number ``slot``. A UUID is better than a PCI address, and that
    is better than an index. Only pairs with samples at the same time are returned.
    """
    better = pl.when(pl.col("uuid").is_not_null()).then(2).when(pl.col("pci").is_not_null()).then(1).otherwise(0)
    devices = table.select(
        "at",
        "slot",
        better.alias("rank"),
        pl.col("first").dt.epoch("ms").alias("from_ms"),
        (pl.col("last").dt.epoch("ms") + pl.col("step_ms")).alias("to_ms"),
    )
    overlapping = devices.join(devices, on="slot", suffix="_other").filter(
        (pl.col("rank_other") > pl.col("rank"))
        & (pl.col("from_ms_other") < pl.col("to_ms"))
        & (pl.col("from_ms") < pl.col("to_ms_other"))
    )
    columns = {"from_ms_other": "from_ms", "to_ms_other": "to_ms"}
    return overlapping.select("at", pl.col("at_other").alias("other"), *columns).rename(columns).sort("at", "other")


def without(excluded: pl.DataFrame) -> pl.DataFrame:
    """Return ``PERIODS`` that are not ``excluded`` (``PERIODS``), for the devices in ``excluded``."""
    rows = excluded.sort("at", "from_ms").with_columns(
        pl.col("to_ms").cum_max().shift().over("at").fill_null(-FAR).alias("before")
    )
    between = rows.select("at", pl.col("before").alias("from_ms"), pl.col("from_ms").alias("to_ms"))
    after = excluded.group_by("at", maintain_order=True).agg(
        pl.col("to_ms").max().alias("from_ms"), pl.lit(FAR).alias("to_ms")
    )
    periods = pl.concat([frame.cast(PERIODS) for frame in (between, after)])  # type: ignore[arg-type]
    return periods.filter(pl.col("from_ms") < pl.col("to_ms")).sort("at", "from_ms")


def clipped(spans: pl.DataFrame, counted: pl.DataFrame) -> pl.DataFrame:
    """Return ``spans`` (``at``, ``start_ms``, ``end_ms`` and others), cut to the periods in which a device counts.

    ``counted``: ``PERIODS`` of the devices that do not always count.
    """
    cut = spans.join(counted, on="at", how="inner", maintain_order="left").with_columns(
        pl.max_horizontal("start_ms", "from_ms").alias("start_ms"), pl.min_horizontal("end_ms", "to_ms").alias("end_ms")
    )
    whole = spans.join(counted, on="at", how="anti", maintain_order="left")
    return pl.concat([whole, cut.filter(pl.col("start_ms") < pl.col("end_ms")).select(spans.columns)])


def united(spans: pl.DataFrame) -> pl.DataFrame:
    """Return ``slot``, ``start_ms``, ``end_ms``: the time that any of ``spans`` (with these columns) covers."""
    ordered = spans.select("slot", "start_ms", "end_ms").sort("slot", "start_ms")
    before = pl.col("end_ms").cum_max().shift().over("slot")
    apart = (pl.col("start_ms") > before).fill_null(value=True)
    return (
        ordered.with_columns(apart.cum_sum().alias("stretch"))
        .group_by("stretch", maintain_order=True)
        .agg(pl.col("slot", "start_ms").first(), pl.col("end_ms").max())
        .drop("stretch")
    )
