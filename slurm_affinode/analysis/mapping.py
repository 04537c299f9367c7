"""Which GPUs a run had: by the labels of the history, by recorded ids, by whole nodes; else unknown."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from slurm_affinode.history.identity import pci_address
from slurm_affinode.slurm import jobid

MATCH = {"run": pl.Int64(), "at": pl.Int64(), "weight": pl.Int64()}
"""A run, a row of the device table, and how much speaks for the pair (labelled samples)."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Runs and their GPUs."""

    pairs: pl.DataFrame
    """``run``, ``at``, ``mapping``: each pair once."""
    mismatches: pl.DataFrame
    """``job``, ``node``, ``first``, ``last``, ``rows``: labels that no run of accounting fits, or that name more GPUs
    than the run has."""
    spans: pl.DataFrame
    """``run``, ``at``, ``first_ms``, ``last_ms``: from when to when labels state the pair."""
    left_out: pl.Series
    """Rows of the device table that are parents of MIG instances."""


def one_cluster(devices: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """``devices`` without the cluster's name, where history and accounting each know one cluster by another name.

    Exporters seldom know what Slurm calls the cluster; with one on each side there is nothing to confuse.
    """
    seen, said = devices["cluster"].drop_nulls().unique(), runs["cluster"].drop_nulls().unique()
    if len(seen) == 1 and len(said) == 1 and seen[0] != said[0]:
        return devices.with_columns(pl.lit(said[0]).alias("cluster"))
    return devices


def find(
    runs: pl.DataFrame, nodes: pl.DataFrame, devices: pl.DataFrame, labels: pl.DataFrame, recorded: pl.DataFrame
) -> Mapped:
    """Map ``runs`` (``runs.prepare``) to ``devices`` (``DEVICES``; the row number is ``at``).

    ``nodes``: ``runs.nodes_of``; ``labels``: the job labels of the history with ``at``; ``recorded``:
    ``ALLOCATION_GPUS``.
    """
    table = devices.with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))
    parents = _parents(table)
    said, mismatches = by_labels(runs, nodes, table, labels)
    labelled = _without(said.select(*MATCH), runs, parents)
    labelled, beyond = _at_most_gpus(labelled, runs)
    mismatches = pl.concat([mismatches, _as_mismatches(beyond, runs, table)], how="diagonal")
    rest = runs.join(labelled, on="run", how="anti", maintain_order="left")
    known, _ = _at_most_gpus(by_record(rest, nodes, table, recorded, parents), runs)
    rest = rest.join(known, on="run", how="anti", maintain_order="left")
    taken = pl.concat([labelled, known])
    whole = by_whole_node(rest, runs, nodes, table, taken, parents)
    words = (("labels", labelled), ("recorded", known), ("whole-node", whole))
    pairs = pl.concat([f.select("run", "at", pl.lit(word).alias("mapping")) for word, f in words])
    spans = said.select("run", "at", "first_ms", "last_ms")
    return Mapped(pairs.sort("run", "at"), mismatches, spans, parents["at"].unique())


def _parents(table: pl.DataFrame) -> pl.DataFrame:
    """``at``, ``from``, ``to``: whole-GPU series of GPUs that had MIG instances, and when."""
    children = table.filter(pl.col("mig").is_not_null())
    wholes = table.filter(pl.col("mig").is_null())
    found = [
        wholes.filter(pl.col(mark).is_not_null())
        .join(children.select("cluster", "node", mark, "first", "last"), on=["cluster", "node", mark], nulls_equal=True)
        .select("at", pl.col("first_right").alias("from"), pl.col("last_right").alias("to"))
        for mark in ("uuid", "pci", "index")
    ]
    return pl.concat(found).group_by("at").agg(pl.col("from").min(), pl.col("to").max())


def _without(pairs: pl.DataFrame, runs: pl.DataFrame, parents: pl.DataFrame) -> pl.DataFrame:
    """``pairs`` less those with a parent while it was divided."""
    if parents.is_empty():
        return pairs
    hit = (
        pairs.join(parents, on="at")
        .join(runs.select("run", "start_ms", "end_ms"), on="run")
        .filter(
            (pl.col("from").dt.epoch("ms") < pl.col("end_ms")) & (pl.col("to").dt.epoch("ms") >= pl.col("start_ms"))
        )
    )
    return pairs.join(hit, on=["run", "at"], how="anti", maintain_order="left")


def _at_most_gpus(pairs: pl.DataFrame, runs: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """No more GPUs than accounting says, those with the most evidence; the pairs beyond apart."""
    ranked = (
        pairs.join(runs.select("run", "gpus"), on="run", maintain_order="left")
        .sort("run", "weight", "at", descending=[False, True, False])
        .with_columns(pl.int_range(pl.len()).over("run").alias("rank"))
    )
    # No count, or none of a whole GPU (gres/shard, MPS): the source is all there is.
    fits = (pl.col("gpus").fill_null(0) == 0) | (pl.col("rank") < pl.col("gpus"))
    return ranked.filter(fits).select(*MATCH), ranked.filter(~fits).select(*MATCH)


def _as_mismatches(beyond: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    return beyond.join(runs.select("run", "job_id"), on="run").join(table.select("at", "node"), on="at").select(
        pl.col("job_id").cast(pl.String).alias("job"), "node", pl.col("weight").alias("rows")
    )  # fmt: skip


def by_labels(
    runs: pl.DataFrame, nodes: pl.DataFrame, table: pl.DataFrame, labels: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Pairs that the labels state, and the labels that fit no run.

    A label is a raw id, or an id as people write it (``123_4``, ``123+1``, with a step). It fits a run that has this
    id, in the same cluster, on this node, at a time at which the label was seen. A plain number that is no raw id
    there is taken for the id of an array or a heterogeneous job.
    """
    parts = pl.col("job").str.extract_groups(jobid.PATTERN)
    said = (
        labels.with_row_index("label")
        .join(table.select("at", "cluster", "node"), on="at", maintain_order="left")
        .with_columns(
            parts.struct.field("1").cast(pl.Int64, strict=False).alias("id"),
            parts.struct.field("2").cast(pl.Int64, strict=False).alias("task"),
            parts.struct.field("4").cast(pl.Int64, strict=False).alias("het"),
            pl.col("first").dt.epoch("ms").alias("first_ms"),
            pl.col("last").dt.epoch("ms").alias("last_ms"),
        )
    )
    plain = said.filter(pl.col("task").is_null() & pl.col("het").is_null())
    exact = [
        _fits(plain, runs, nodes, ["id"], ["job_id"]),
        _fits(said.drop_nulls("task"), runs, nodes, ["id", "task"], ["array_job_id", "array_task_id"]),
        _fits(said.drop_nulls("het"), runs, nodes, ["id", "het"], ["het_job_id", "het_offset"]),
    ]
    rest = plain.join(exact[0], on="label", how="anti", maintain_order="left")
    exact += [_fits(rest, runs, nodes, ["id"], [leader]) for leader in ("array_job_id", "het_job_id")]
    found = pl.concat(exact).unique(["label", "run"])
    pairs = found.group_by("run", "at").agg(
        pl.col("rows").sum().alias("weight"), pl.col("first_ms").min(), pl.col("last_ms").max()
    )
    unfit = said.join(found, on="label", how="anti", maintain_order="left")
    return pairs.sort("run", "at"), unfit.select("job", "node", "first", "last", "rows")


def _fits(
    labels: pl.DataFrame, runs: pl.DataFrame, nodes: pl.DataFrame, left: list[str], right: list[str]
) -> pl.DataFrame:
    """``label``, ``run``, ``at``, ``rows``, ``first_ms``, ``last_ms`` where id, cluster, node and time agree."""
    columns = ["run", "cluster", "begin_ms", "finish_ms", *right]
    candidates = labels.join(runs.select(columns), left_on=left, right_on=right, suffix="_run").filter(
        _same_cluster("cluster", "cluster_run")
        & (pl.col("first_ms") < pl.col("finish_ms"))
        & (pl.col("last_ms") >= pl.col("begin_ms"))
    )
    return _on_its_nodes(candidates, nodes).select("label", "run", "at", "rows", "first_ms", "last_ms")


def _same_cluster(one: str, other: str) -> pl.Expr:
    return pl.col(one).is_null() | pl.col(other).is_null() | (pl.col(one) == pl.col(other))


def _on_its_nodes(candidates: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """``candidates`` (``run``, ``node``) whose node is one of the run's; a node that is not known may be any."""
    unsaid = candidates.filter(pl.col("node").is_null()).select(candidates.columns)
    nowhere = candidates.filter(pl.col("node").is_not_null()).join(nodes, on="run", how="anti")
    there = candidates.join(nodes, on=["run", "node"], how="semi")
    return pl.concat([there, unsaid, nowhere])


def by_record(
    runs: pl.DataFrame, nodes: pl.DataFrame, table: pl.DataFrame, recorded: pl.DataFrame, parents: pl.DataFrame
) -> pl.DataFrame:
    """Pairs that recorded GPU ids (UUID, also of a MIG instance; PCI address; index on the node) state.

    Not those that leave open which GPUs a run had: more ids than it has GPUs (those of several runs of a job, without
    their starts), or the id of a GPU with more MIG instances than that.
    """
    if recorded.is_empty():
        return pl.DataFrame(schema=MATCH)
    marks = pl.DataFrame({"gpu": recorded["gpu"].unique()}, schema={"gpu": pl.String()}).with_columns(
        pl.col("gpu").map_elements(_mark, return_dtype=pl.String, skip_nulls=True).alias("mark")
    )
    wanted = (
        recorded.join(marks, on="gpu")
        .with_columns(pl.col("node").str.split(".").list.first())
        .join(
            runs.select("run", "job_id", "cluster", pl.col("start").alias("run_start"), "start_ms", "end_ms"),
            on="job_id", suffix="_run",
        )
        .filter(
            _same_cluster("cluster", "cluster_run")
            & (pl.col("start").is_null() | (pl.col("start") == pl.col("run_start")))
        )
    )  # fmt: skip
    wanted = _on_its_nodes(wanted, nodes).drop("cluster")
    ways = [
        table.select(
            "at", "cluster", "node", "first", "last", pl.col(name).cast(pl.String).str.to_uppercase().alias("mark")
        )
        for name in ("uuid", "pci", "index")
    ]
    # The number of an instance on its GPU is no index.
    instances = table.filter(pl.col("mig").str.starts_with("MIG-"))
    ways.append(
        instances.select("at", "cluster", "node", "first", "last", pl.col("mig").str.to_uppercase().alias("mark"))
    )
    known = pl.concat(ways).drop_nulls("mark")
    # A record without a node can only name a GPU by its UUID; an index or an address says nothing then.
    unsaid = wanted.filter(pl.col("node").is_null() & pl.col("mark").str.contains("^(?:GPU|MIG)-"))
    met = pl.concat(
        [
            wanted.join(known, on=["node", "mark"], suffix="_gpu").select(*_MET),
            unsaid.join(known, on="mark", suffix="_gpu").select(*_MET),
        ]
    )
    met = met.filter(_same_cluster("cluster_run", "cluster") & _seen_during())
    met = _without(met, runs, parents)
    open_ = _left_open(met, runs, table)
    met = met.join(open_, on="run", how="anti", maintain_order="left")
    return met.group_by("run", "at").agg(pl.len().cast(pl.Int64).alias("weight")).sort("run", "at").select(*MATCH)


def _left_open(met: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """``run`` of those whose records (``run``, ``at``, ``node``, ``mark``) do not tell which GPUs they had."""
    instance = table.select("at", pl.col("mig").is_not_null().alias("instance"), pl.col("node").alias("of"))
    said = (
        met.join(instance, on="at")
        .group_by("run")
        .agg(
            pl.col("at").n_unique().alias("found"),
            pl.struct("of", "mark").n_unique().alias("marks"),
            pl.col("instance").any(),
        )
        .join(runs.select("run", "gpus"), on="run")
    )
    gpus = pl.col("gpus")
    many = (gpus > 0) & (pl.col("found") > gpus) & ((pl.col("marks") > gpus) | pl.col("instance"))
    return said.filter(many.fill_null(value=False)).select("run")


_MET = ("run", "at", "mark", "cluster_run", "cluster", "first", "last", "start_ms", "end_ms")


def _mark(gpu: str) -> str:
    return pci_address(gpu) or gpu.strip().upper()


def _seen_during() -> pl.Expr:
    """Whether samples of the device (``first``, ``last``) touch the run (``start_ms``, ``end_ms``)."""
    return (pl.col("first").dt.epoch("ms") < pl.col("end_ms")) & (pl.col("last").dt.epoch("ms") >= pl.col("start_ms"))


def by_whole_node(  # noqa: PLR0917
    rest: pl.DataFrame,
    runs: pl.DataFrame,
    nodes: pl.DataFrame,
    table: pl.DataFrame,
    taken: pl.DataFrame,
    parents: pl.DataFrame,
) -> pl.DataFrame:
    """Pairs of runs in ``rest`` that had every GPU of a node to themselves."""
    asking = rest.filter(pl.col("gpus").fill_null(0) > 0).select("run", "cluster", "gpus", "start_ms", "end_ms")
    places = nodes.join(asking, on="run", maintain_order="left")
    if places.is_empty() or table.is_empty():
        return pl.DataFrame(schema=MATCH)
    places = places.join(_crowded(runs, nodes, taken), on=["run", "node"], how="left", maintain_order="left")
    met = (
        places.join(table.select("at", "node", "first", "last", pl.col("cluster").alias("of")), on="node")
        .filter(_same_cluster("cluster", "of"))
        .select("run", "node", "at", pl.lit(0, dtype=pl.Int64).alias("weight"), _seen_during().alias("seen"))
    )
    met = _without(met, runs, parents)
    found = _every_gpu(places, met.filter("seen"))
    # A GPU whose samples begin behind the run or end before it: it is one of the node's, its time is unknown.
    watched = met.join(found, on="run", how="anti").filter(pl.col("seen").any().over("run"))
    return pl.concat([found, _every_gpu(places, watched)]).sort("run", "at")


def _every_gpu(places: pl.DataFrame, met: pl.DataFrame) -> pl.DataFrame:
    """The pairs of ``met`` (``run``, ``node``, ``at``) where they are as many GPUs as the run has."""
    count = met.group_by("run", "node").agg(pl.len().cast(pl.Int64).alias("there"))
    places = places.join(count, on=["run", "node"], how="left").with_columns(
        pl.col("there").fill_null(0), pl.col("crowded").fill_null(value=False)
    )
    over_run = {"on": pl.len().over("run"), "all": pl.col("there").sum().over("run")}
    places = places.with_columns(**over_run, alone=~pl.col("crowded").any().over("run"))
    everywhere = (pl.col("all") == pl.col("gpus")) & (pl.col("there") > 0).all().over("run") & pl.col("alone")
    on_each = (pl.col("there") * pl.col("on") == pl.col("gpus")) & ~pl.col("crowded")
    good = places.filter(everywhere | on_each).select("run", "node")
    return met.join(good, on=["run", "node"], how="semi").select(*MATCH)


def _crowded(runs: pl.DataFrame, nodes: pl.DataFrame, taken: pl.DataFrame) -> pl.DataFrame:
    """``run``, ``node``, ``crowded``: whether another run with GPUs was on the node at the same time."""
    mapped = pl.col("run").is_in(taken["run"].unique().implode())
    with_gpus = runs.filter((pl.col("gpus").fill_null(0) > 0) | mapped)
    stays = (
        nodes.join(with_gpus.select("run", "cluster", "start_ms", "end_ms"), on="run")
        .sort("cluster", "node", "start_ms", "end_ms", "run")
        .with_columns(
            pl.col("end_ms").cum_max().shift().over("cluster", "node").alias("before"),
            pl.col("start_ms").shift(-1).over("cluster", "node").alias("after"),
        )
    )
    crowded = (pl.col("before") > pl.col("start_ms")).fill_null(value=False) | (
        pl.col("after") < pl.col("end_ms")
    ).fill_null(value=False)
    return stays.select("run", "node", crowded.alias("crowded"))
