"""The GPUs of each run: by labels of the metrics, by recorded IDs, by whole nodes; else unknown.

Evidence counts per node and GPU. Labels and records name GPUs; a whole node is a conclusion from counts, drawn only
where the number of GPUs of the node is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from slurm_affinode.analysis.samples import Index
from slurm_affinode.history.identity import pci_address
from slurm_affinode.slurm import jobid
from slurm_affinode.slurm.schema import ALLOCATION_GPUS, conform

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


def of_index(
    index: Index, runs: pl.DataFrame, nodes: pl.DataFrame, allocation_gpus: pl.DataFrame
) -> tuple[pl.DataFrame, Mapped]:
    """Return the devices of ``index`` under accounting's name of their cluster, and ``find`` for them."""
    devices, earlier = one_cluster(index.devices, runs), one_cluster(index.earlier, runs)
    return devices, find(runs, nodes, devices, earlier, index.labels, conform(allocation_gpus, ALLOCATION_GPUS))


def find(  # noqa: PLR0917 - the kinds of evidence
    runs: pl.DataFrame,
    nodes: pl.DataFrame,
    devices: pl.DataFrame,
    earlier: pl.DataFrame,
    labels: pl.DataFrame,
    recorded: pl.DataFrame,
) -> Mapped:
    """Map ``runs`` (``runs.prepare``) to ``devices`` (``DEVICES``; the row number is ``at``).

    ``nodes``: ``runs.nodes_of``; ``earlier``: ``DEVICES`` sampled in the days before the interval; ``labels``: the job
    labels of the metrics with ``at``; ``recorded``: ``ALLOCATION_GPUS``.
    """
    table = devices.with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))
    parents = _parents(table)
    said, mismatches = by_labels(runs, nodes, table, labels)
    labelled, beyond = _at_most_gpus(_without(said.select(*MATCH), runs, parents), runs)
    mismatches = pl.concat([mismatches, _as_mismatches(beyond, runs, table)], how="diagonal")
    by_id, there = by_record(runs, nodes, table, recorded, parents)
    known = _named(labelled, by_id, runs, table)
    whole = by_whole_node(runs, nodes, table, earlier, recorded, known, there)
    pairs = pl.concat([known, whole.select("run", "at", pl.lit("whole-node").alias("mapping"))])
    spans = said.select("run", "at", "first_ms", "last_ms")
    return Mapped(pairs.sort("run", "at"), mismatches, spans, parents["at"].unique())


def _named(labelled: pl.DataFrame, recorded: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """``run``, ``at``, ``mapping``: the labelled pairs, and recorded ones where labels leave room for them.

    On a node a run has as many GPUs as labels or records name there, whichever are more: where they name different
    ones, labels count.
    """
    both = pl.concat(
        [
            labelled.select(*MATCH, pl.lit("labels").alias("mapping"), pl.lit(0).alias("order")),
            recorded.select(*MATCH, pl.lit("recorded").alias("mapping"), pl.lit(1).alias("order")),
        ]
    ).join(table.select("at", "node"), on="at", maintain_order="left")
    most = both.group_by("run", "node", "mapping").agg(pl.len()).group_by("run", "node").agg(pl.col("len").max())
    ranked = (
        both.sort("run", "order", "weight", "at", descending=[False, False, True, False])
        .unique(["run", "at"], keep="first", maintain_order=True)
        .join(most, on=["run", "node"], nulls_equal=True, maintain_order="left")
        .with_columns(pl.int_range(pl.len()).over("run", "node").alias("rank"))
        .filter(pl.col("rank") < pl.col("len"))
        .with_columns((pl.col("weight") - pl.col("order") * (1 << 62)).alias("weight"))
    )
    kept, _ = _at_most_gpus(ranked.select(*MATCH), runs)
    return ranked.join(kept, on=["run", "at"], how="semi", maintain_order="left").select("run", "at", "mapping")


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
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Pairs that recorded GPU ids (UUID, also of a MIG instance; PCI address; index on the node) state; and ``run``,
    ``node``, ``gpus``: how many GPUs of the node records name, with or without samples.

    Not those that leave open which GPUs a run had: more ids than it has GPUs (those of several runs of a job, without
    their starts), or the id of a GPU with more MIG instances than that.
    """
    if recorded.is_empty():
        return pl.DataFrame(schema=MATCH), pl.DataFrame(schema=_NAMED)
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
    unseen = wanted.drop_nulls("node").join(met, on=["run", "mark"], how="anti").select("run", "node", "mark").unique()
    met = _without(met, runs, parents)
    open_ = _left_open(met, runs, table)
    met = met.join(open_, on="run", how="anti", maintain_order="left")
    pairs = met.group_by("run", "at").agg(pl.len().cast(pl.Int64).alias("weight"))
    seen = pairs.join(table.select("at", "node"), on="at").select("run", "node")
    there = pl.concat([seen, unseen.select("run", "node")]).group_by("run", "node")
    return pairs.sort("run", "at").select(*MATCH), there.agg(pl.len().cast(pl.Int64).alias("gpus"))


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


_NAMED = {"run": pl.Int64(), "node": pl.String(), "gpus": pl.Int64()}
_MET = ("run", "at", "mark", "cluster_run", "cluster", "first", "last", "start_ms", "end_ms")


def _mark(gpu: str) -> str:
    return pci_address(gpu) or gpu.strip().upper()


def _seen_during() -> pl.Expr:
    """Whether samples of the device (``first``, ``last``) touch the run (``start_ms``, ``end_ms``)."""
    return (pl.col("first").dt.epoch("ms") < pl.col("end_ms")) & (pl.col("last").dt.epoch("ms") >= pl.col("start_ms"))


def by_whole_node(  # noqa: PLR0917
    runs: pl.DataFrame,
    nodes: pl.DataFrame,
    table: pl.DataFrame,
    earlier: pl.DataFrame,
    recorded: pl.DataFrame,
    known: pl.DataFrame,
    recorded_there: pl.DataFrame,
) -> pl.DataFrame:
    """Pairs of runs that had every GPU of a node to themselves: of nodes on which ``known`` (``run``, ``at``) and
    ``recorded_there`` (``run``, ``node``, ``gpus``) name none of the run's GPUs.

    The GPUs of a node are the places that samples of the interval and of the days before it (``earlier``) show. Where
    accounting or a record shows more GPUs than that, their number is not known, and so are the run's.
    """
    seen = known.join(table.select("at", "node"), on="at").group_by("run", "node")
    named = pl.concat([seen.agg(pl.len().cast(pl.Int64).alias("gpus")), recorded_there])
    named = named.group_by("run", "node").agg(pl.col("gpus").max())
    missing = pl.col("gpus").fill_null(0) - pl.col("named").fill_null(0)
    asking = (
        runs.join(named.group_by("run").agg(pl.col("gpus").sum().alias("named")), on="run", how="left")
        .with_columns(missing.alias("missing"))
        .filter(pl.col("missing") > 0)
        .select("run", "cluster", "gpus", "missing", "start_ms", "end_ms")
    )
    places = (
        nodes.join(named, on=["run", "node"], how="anti", maintain_order="left")
        .with_columns(pl.len().cast(pl.Int64).over("run").alias("on"))
        .join(asking, on="run", maintain_order="left")
    )
    if places.is_empty() or table.is_empty():
        return pl.DataFrame(schema=MATCH)
    # Devices of the days before have the numbers behind those of the interval.
    before = earlier.join(table, on="device", how="anti").with_row_index("at", offset=table.height)
    every = pl.concat([table, before.with_columns(pl.col("at").cast(pl.Int64)).select(table.columns)])
    every = every.join(_slots(every), on="at")
    met = (
        places.select("run", "node", "cluster", "start_ms", "end_ms")
        .join(every.rename({"cluster": "of"}), on="node")
        .filter(_same_cluster("cluster", "of"))
        .with_columns((_seen_during() & (pl.col("at") < table.height)).alias("seen"))
    )
    met = _without(met, runs, _parents(every))
    there = _gpus_of_nodes(met)
    at_least = _least(runs, nodes, recorded)
    count = there.group_by("run", "node").agg(pl.len().cast(pl.Int64).alias("there"), pl.col("seen").any())
    numbered = met.group_by("run", "node").agg((pl.col("index").max() + 1).cast(pl.Int64).alias("numbered"))
    places = (
        places.join(count, on=["run", "node"], how="left")
        .join(numbered, on=["run", "node"], how="left")
        .join(_crowded(runs, nodes, known), on=["run", "node"], how="left")
        .join(at_least, on=["cluster", "node"], how="left", nulls_equal=True)
        .with_columns(pl.col("there").fill_null(0), pl.col("crowded").fill_null(value=False))
        .with_columns((pl.max_horizontal("least", "numbered", pl.lit(0)) <= pl.col("there")).alias("certain"))
        .with_columns(
            pl.col("there").sum().over("run").alias("all"),
            (pl.col("certain") & (pl.col("there") > 0) & ~pl.col("crowded")).all().over("run").alias("alone"),
            pl.col("seen").any().over("run"),
        )
    )
    everywhere = (pl.col("all") == pl.col("missing")) & pl.col("alone")
    share = (pl.col("there") * pl.col("on") == pl.col("missing")) & pl.col("certain") & ~pl.col("crowded")
    good = places.filter(pl.col("seen") & (everywhere | share)).select("run", "node")
    found = there.filter("seen").join(good, on=["run", "node"], how="semi")
    return found.select("run", "at", pl.lit(0, dtype=pl.Int64).alias("weight")).sort("run", "at")


def _slots(every: pl.DataFrame) -> pl.DataFrame:
    """``at``, ``place``, ``slot``: where on its node each device is. A GPU that replaces another has its slot.

    The place is the PCI address, else the index, else the UUID. Two devices that were sampled at the same time are two
    GPUs, also where the metrics give them one index, as happens when indices shift behind a GPU that was lost.
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
    placed = every.join(by_index, on=[*where, "index"], how="left", nulls_equal=True).with_columns(
        pl.coalesce("pci", "there", pl.format("#{}", text), "uuid", pl.format("?{}", "at")).alias("place")
    )
    group = [*where, "place", "mig"]
    last_before = pl.col("last").cum_max().shift().over(group, order_by="first")
    at_once = (last_before >= pl.col("first")).fill_null(value=False).any().over(group)
    own = pl.when(at_once).then(pl.col("at")).otherwise(None)
    return placed.select("at", "place", pl.struct("place", "mig", own.alias("own")).alias("slot"))


def _gpus_of_nodes(met: pl.DataFrame) -> pl.DataFrame:
    """One row of ``met`` per run, node and GPU that was there: of those with samples during the run the one that the
    run overlaps for longest; else the newest.

    A GPU that was divided, or is divided since, is not there a second time.
    """
    overlap = pl.min_horizontal(pl.col("last").dt.epoch("ms"), "end_ms") - pl.max_horizontal(
        pl.col("first").dt.epoch("ms"), "start_ms"
    )
    one = met.with_columns(overlap.alias("overlap")).sort(
        "run", "node", "seen", "overlap", "at", descending=[False, False, True, True, False]
    )
    one = one.unique(["run", "node", "slot"], keep="first", maintain_order=True)
    divided = pl.col("mig").is_not_null()
    seen = one.filter("seen").select("run", "node", "place", divided.alias("other"))
    unseen = one.filter(~pl.col("seen")).with_columns((~divided).alias("other"))
    unseen = unseen.join(seen, on=["run", "node", "place", "other"], how="anti").drop("other")
    return pl.concat([one.filter("seen"), unseen]).select("run", "node", "at", "seen")


def _least(runs: pl.DataFrame, nodes: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """``cluster``, ``node``, ``least``: so many GPUs a node has at least.

    By accounting, as many as the runs on this node alone had at the same time; by records, as many as a run had there,
    and as the highest index says.
    """
    alone = nodes.filter(pl.len().over("run") == 1).join(
        runs.filter(pl.col("gpus") > 0).select("run", "cluster", "gpus", "start_ms", "end_ms"), on="run"
    )
    changes = pl.concat(
        [
            alone.select("cluster", "node", pl.col("start_ms").alias("ms"), pl.col("gpus").alias("change")),
            alone.select("cluster", "node", pl.col("end_ms").alias("ms"), (-pl.col("gpus")).alias("change")),
        ]
    )
    # At the same moment a run ends before another begins.
    held = changes.sort("cluster", "node", "ms", "change").with_columns(
        pl.col("change").cum_sum().over("cluster", "node").alias("least")
    )
    found = [held.select("cluster", "node", "least")]
    if not recorded.is_empty():
        of_jobs = recorded.drop_nulls("node").with_columns(
            pl.col("node").str.split(".").list.first(),
            pl.col("gpu").str.extract(r"^\s*([0-9]{1,4})\s*$").cast(pl.Int64).alias("index"),
        )
        clusters = runs.select("job_id", pl.col("cluster").alias("of")).unique()
        of_jobs = of_jobs.join(clusters, on="job_id").filter(_same_cluster("cluster", "of"))
        found += [
            of_jobs.select(pl.col("of").alias("cluster"), "node", (pl.col("index") + 1).alias("least")),
            of_jobs.drop_nulls("start")
            .group_by(pl.col("of").alias("cluster"), "node", "job_id", "start")
            .agg(pl.col("gpu").n_unique().cast(pl.Int64).alias("least"))
            .select("cluster", "node", "least"),
        ]
    return pl.concat(found).group_by("cluster", "node").agg(pl.col("least").max())


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
