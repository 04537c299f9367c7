"""Decide which GPUs labels and records assign to runs; ambiguous evidence assigns none.

A GPU counts by its slot: the devices of one slot followed each other. A run without a number of GPUs in accounting
(gres/shard, MPS, untracked GPUs) may have any number of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

_UNLIMITED = 1 << 40
_PAIR = ("run", "slot")


@dataclass(frozen=True, slots=True)
class Settled:
    """GPUs that labels and records assign to runs."""

    pairs: pl.DataFrame
    """``run``, ``at``, ``mapping`` (``labels`` or ``recorded``)."""
    unused: pl.DataFrame
    """``run``, ``at``, ``weight``: label pairs that are not used."""
    doubtful: pl.DataFrame
    """``run``, ``why``: runs with labels or records that leave their GPUs open."""


def settle(  # noqa: PLR0917 - the kinds of evidence
    labels: pl.DataFrame,
    records: pl.DataFrame,
    complete: pl.Series,
    runs: pl.DataFrame,
    nodes: pl.DataFrame,
    devices: pl.DataFrame,
) -> Settled:
    """Combine labels and records by the rule ``mapping`` of ``docs/metrics.md``.

    ``labels``: ``run``, ``at``, ``weight``, ``leader`` (the label is the ID of an array or a heterogeneous job);
    ``records``: ``run``, ``at``, without ambiguous records; ``complete``: runs with all of their GPUs in records;
    ``runs``: ``run``, ``gpus``, ``start_ms``, ``end_ms``; ``nodes``: from ``runs.nodes_of``; ``devices``: ``at``,
    ``node``, ``slot``, ``instance`` (of MIG).
    """
    about = _with_limit_of_node(runs.select("run", "start_ms", "end_ms", _limit()), nodes)
    labeled = labels.join(devices, on="at", maintain_order="left").join(about, on="run", maintain_order="left")
    recorded = records.select("run", "at").join(devices, on="at", maintain_order="left")
    recorded = recorded.join(about, on="run", maintain_order="left")
    many = _beyond(labeled)
    contrary = _beyond(pl.concat([labeled, recorded], how="diagonal").filter(~_in(many)))
    # Labels that contradict records: only GPUs that both name.
    usable = labeled.filter(~(_in(many) & _in(complete)))
    usable = pl.concat([usable.filter(~_in(contrary)), _common_pairs(usable.filter(_in(contrary)), recorded)])
    recorded = pl.concat([recorded.filter(~_in(contrary)), _common_pairs(recorded.filter(_in(contrary)), usable)])
    usable = usable.with_row_index("claim")
    disputed = _disputed(usable, recorded)
    undecided = pl.concat([many.filter(~many.is_in(complete.implode())), disputed["run"]]).unique()
    accepted = pl.concat([usable.filter(~_in(undecided)), recorded], how="diagonal")
    open_ = _not_held(usable.filter(_in(undecided)), accepted, recorded)
    still = _beyond(pl.concat([open_, recorded.filter(_in(undecided))], how="diagonal"))
    good = open_.filter(~_in(still)).join(_disputed(open_, recorded), on="claim", how="anti", maintain_order="left")
    confirmed = pl.concat([usable.filter(~_in(undecided)), good])
    lost = open_.join(good, on="claim", how="anti", maintain_order="left")["run"]
    measured = pl.concat([confirmed, recorded], how="diagonal").group_by("run").agg(pl.col("slot").n_unique())
    short = about.filter(_in(undecided), pl.col("limit") < _UNLIMITED).join(measured, on="run", how="left")
    lost = pl.concat([lost, short.filter(pl.col("slot").fill_null(0) < pl.col("limit"))["run"]])
    doubtful = pl.concat(
        [
            pl.DataFrame({"run": lost.unique(), "why": "labels"}, schema=_DOUBTFUL),
            pl.DataFrame({"run": contrary, "why": "contradiction"}, schema=_DOUBTFUL),
        ]
    )
    pairs = pl.concat(
        [
            confirmed.select("run", "at", pl.lit("labels").alias("mapping")),
            recorded.join(confirmed, on=_PAIR, how="anti", maintain_order="left").select(
                "run", "at", pl.lit("recorded").alias("mapping")
            ),
        ]
    )
    unused = labeled.join(confirmed, on=["run", "at"], how="anti", maintain_order="left").select("run", "at", "weight")
    return Settled(pairs.unique(["run", "at"], keep="first", maintain_order=True), unused, doubtful)


_DOUBTFUL = {"run": pl.Int64(), "why": pl.String()}


def _limit() -> pl.Expr:
    return pl.when(pl.col("gpus") > 0).then("gpus").otherwise(_UNLIMITED).alias("limit")


def _with_limit_of_node(runs: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """Add ``local_limit``, the maximum number of GPUs on one node: a run has at least one on each of its others."""
    other_nodes = pl.col("len").cast(pl.Int64).fill_null(1) - 1
    local_limit = (
        pl.when(pl.col("limit") > other_nodes).then(pl.col("limit") - other_nodes).otherwise("limit").alias("here")
    )
    counts = nodes.group_by("run").len()
    return runs.join(counts, on="run", how="left", maintain_order="left").with_columns(local_limit).drop("len")


def _in(runs: pl.Series) -> pl.Expr:
    return pl.col("run").is_in(runs.implode())


def _beyond(pairs: pl.DataFrame) -> pl.Series:
    """Return the runs with more GPUs in ``pairs`` than they have, in total or on a node."""
    of_nodes = pairs.group_by("run", "node").agg(pl.col("slot").n_unique(), pl.col("limit", "here").first())
    over = of_nodes.group_by("run").agg(
        ((pl.col("slot") > pl.col("here")).any() | (pl.col("slot").sum() > pl.col("limit").first())).alias("over")
    )
    return over.filter("over")["run"]


def _common_pairs(pairs: pl.DataFrame, confirmed: pl.DataFrame) -> pl.DataFrame:
    return pairs.join(confirmed, on=_PAIR, how="semi", maintain_order="left")


def _disputed(claims: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """Return ``claim``, ``run`` of label pairs on GPUs that another run claims at the same time: one of both is wrong.

    Slurm does not share a MIG instance; exporters label each instance with all jobs of its GPU. The ID of an array or
    a heterogeneous job does not say which of its jobs has the GPU.
    """
    doubtful = claims.filter(pl.col("instance") | pl.col("leader")).join(recorded, on=_PAIR, how="anti")
    claimed = pl.concat([claims, recorded], how="diagonal").with_columns(pl.col("leader").fill_null(value=False))
    shared_slots = doubtful.join(claimed, on="slot", suffix="_other").filter(
        (pl.col("run") != pl.col("run_other"))
        & _at_once()
        & (pl.col("instance") | (pl.col("leader") & pl.col("leader_other")))
    )
    return shared_slots.select("claim", "run").unique("claim")


def _not_held(claims: pl.DataFrame, accepted: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """Drop the ``claims`` on GPUs that another run is known to have held at the time."""
    rivals = claims.join(accepted.select("run", "slot", "start_ms", "end_ms"), on="slot", suffix="_other").filter(
        (pl.col("run") != pl.col("run_other")) & _at_once()
    )
    confirmed = _common_pairs(claims, recorded)
    unconfirmed = rivals.join(confirmed, on="claim", how="anti")
    return claims.join(unconfirmed, on="claim", how="anti", maintain_order="left")


def _at_once() -> pl.Expr:
    return (pl.col("start_ms") < pl.col("end_ms_other")) & (pl.col("start_ms_other") < pl.col("end_ms"))
