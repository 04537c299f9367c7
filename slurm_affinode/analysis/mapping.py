"""Map runs to GPUs by job labels of the metrics, recorded GPU IDs, or whole nodes.

Evidence is evaluated per node and GPU. Labels and records name GPUs; a whole node is inferred from counts, and only if
the node's number of GPUs is known. Otherwise the run's GPUs are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import polars as pl

from slurm_affinode.analysis import evidence, slots
from slurm_affinode.analysis.samples import Index
from slurm_affinode.metrics.identity import pci_address
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, RECORDED_GPUS, conform

MATCH = {"run": pl.Int64(), "at": pl.Int64(), "weight": pl.Int64()}
"""A run, a row of the device table, and the weight of the evidence for the pair (number of labeled samples)."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Runs mapped to GPUs."""

    pairs: pl.DataFrame
    """``run``, ``at``, ``mapping``, ``slot``; no duplicates. The devices of one slot are one GPU after the other."""
    mismatches: pl.DataFrame
    """``job``, ``node``, ``first``, ``last``, ``rows``: labels that match no run of accounting, or that name more GPUs
    than the run has."""
    spans: pl.DataFrame
    """``run``, ``at``, ``first_ms``, ``last_ms``: time span of the labels for the pair."""
    slot_of: pl.Series
    """The number of the slot of each row of the device table, as ``slot`` of ``pairs``."""
    counted: pl.DataFrame
    """``slots.PERIODS`` of the devices that do not always count: parents of MIG instances, and devices that have a
    better name at times."""
    left_out: pl.Series
    """Rows of the device table that are parents of MIG instances."""
    doubtful: pl.DataFrame
    """``run``, ``why`` (``labels``, ``records``, ``contradiction``): runs whose evidence leaves some GPUs open."""
    undated: pl.DataFrame
    """``RECORDED_GPUS``: records without a start of jobs with several runs. They are not used."""


def with_slurm_cluster(devices: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return ``devices`` with accounting's cluster name, if metrics and accounting each name one, but differently.

    Exporters rarely know Slurm's name of the cluster. With one cluster on each side the match is unambiguous.
    """
    clusters, recorded = devices["cluster"].drop_nulls().unique(), runs["cluster"].drop_nulls().unique()
    if len(clusters) == 1 and len(recorded) == 1 and clusters[0] != recorded[0]:
        return devices.with_columns(pl.lit(recorded[0]).alias("cluster"))
    return devices


def of_index(
    index: Index, runs: pl.DataFrame, nodes: pl.DataFrame, allocation_gpus: pl.DataFrame, uncertain: pl.DataFrame
) -> tuple[pl.DataFrame, Mapped]:
    """Return the devices of ``index`` with accounting's name of their cluster, and the mapping of runs to them.

    ``runs``: from ``runs.certain``; ``nodes``: those of ``runs`` and of ``uncertain`` (``runs.uncertain``), whose nodes
    others may not have had alone.
    """
    clusters = pl.concat([runs.select("cluster"), uncertain.select("cluster")])
    devices, earlier = (
        with_slurm_cluster(index.devices, clusters),
        with_slurm_cluster(index.earlier, clusters),
    )
    recorded = conform(allocation_gpus, RECORDED_GPUS)
    return devices, find(runs, nodes, devices, earlier, index.names, index.labels, recorded, index.until, uncertain)


def find(  # noqa: PLR0917 - the kinds of evidence
    runs: pl.DataFrame,
    nodes: pl.DataFrame,
    devices: pl.DataFrame,
    earlier: pl.DataFrame,
    names: pl.DataFrame,
    labels: pl.DataFrame,
    recorded: pl.DataFrame,
    until: datetime,
    uncertain: pl.DataFrame | None = None,
) -> Mapped:
    """Map ``runs`` (``runs.prepare``) to ``devices`` (``DEVICES``; the row number is ``at``).

    ``nodes``: from ``runs.nodes_of``, those of ``uncertain`` included; ``earlier``: ``DEVICES`` sampled in the days
    before the interval; ``names``: ``NAMES_SEEN`` of both; ``labels``: job labels of the metrics, with ``at``;
    ``recorded``: ``RECORDED_GPUS``; ``until``: the end of the interval; ``uncertain``: from ``runs.uncertain``.
    """
    several, nodes = nodes, nodes.join(runs, on="run", how="semi", maintain_order="left")
    table = devices.with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))
    parents = _parents(table)
    # Devices seen only in earlier days are numbered after those of the interval.
    before = earlier.join(table, on="device", how="anti").with_row_index("at", offset=table.height)
    every = pl.concat([table, before.with_columns(pl.col("at").cast(pl.Int64)).select(table.columns)])
    every = every.join(slots.of_devices(every), on="at", maintain_order="left").join(
        _highest(names), on="device", how="left", maintain_order="left"
    )
    by_label, mismatches = by_labels(runs, nodes, table, labels)
    dated, undated = _dated(recorded, runs)
    records = by_record(runs, nodes, every.head(table.height), names, dated, parents)
    number = pl.struct("cluster", "node", "slot").rank("dense").cast(pl.Int64).alias("slot")
    numbered = every.head(table.height).with_columns(number)
    about = numbered.select("at", "node", "slot", pl.col("mig").is_not_null().alias("instance"))
    twins = slots.twins(numbered)
    labelled = _without(by_label.select(*MATCH, "leader"), runs, parents)
    settled = evidence.settle(labelled, records.pairs, records.complete, runs, nodes, about)
    mismatches = pl.concat([mismatches, _as_mismatches(settled.unused, runs, table)], how="diagonal")
    mapped_pairs = _with_twins(settled.pairs, runs, twins).sort("run", "at")
    open_ = records.open.select("run", pl.lit("records").alias("why")).join(
        _fully_mapped(mapped_pairs, runs, about), on="run", how="anti"
    )
    doubtful = pl.concat([settled.doubtful, open_]).unique("run", keep="first", maintain_order=True).sort("run")
    sure = runs.join(doubtful, on="run", how="anti", maintain_order="left")
    # A GPU that appears later on the last day may be a replacement: it does not count for the node.
    all_devices = pl.concat([frame.filter(pl.col("first") < until)["device"] for frame in (every, earlier)])
    counted = every.filter(pl.col("device").is_in(all_devices.implode()))
    # Also those with evidence that is not used: they may have had a GPU.
    named = pl.concat([by_label["run"], records.named]).unique()
    maybe = None
    if uncertain is not None and not uncertain.is_empty():
        claims = by_labels(uncertain, several, table, labels)[0]["run"], records_of(uncertain, several, dated)["run"]
        with_gpus = (pl.col("gpus") > 0) | pl.col("run").is_in(pl.concat(claims).implode())
        maybe = several.join(uncertain.filter(with_gpus.fill_null(value=False)).select(*_STAY), on="run")
    whole = by_whole_node(runs, sure, nodes, counted, table, recorded, mapped_pairs, records.gpu_counts, named, maybe)
    pairs = pl.concat([mapped_pairs, whole.select("run", "at", pl.lit("whole-node").alias("mapping"))])
    pairs = pairs.join(about.select("at", "slot"), on="at", maintain_order="left").sort("run", "at")
    spans = by_label.select("run", "at", "first_ms", "last_ms")
    divided = parents.join(numbered.select("at", "step_ms"), on="at").select(
        "at", from_ms=pl.col("from").dt.epoch("ms"), to_ms=pl.col("to").dt.epoch("ms") + pl.col("step_ms")
    )
    counted = slots.without(pl.concat([frame.select(*slots.PERIODS) for frame in (twins, divided)]))
    return Mapped(pairs, mismatches, spans, about["slot"], counted, parents["at"].unique(), doubtful, undated)


def _dated(recorded: pl.DataFrame, runs: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split records into those of a single run, and those without a start of jobs with several runs."""
    attempts = runs.group_by("cluster", "job_id").agg(pl.len().alias("here"))
    recorded_attempts = recorded.join(attempts, on="job_id", how="left", suffix="_run", maintain_order="left").filter(
        pl.col("cluster_run").is_null() | _same_cluster("cluster", "cluster_run")
    )
    several = pl.col("start").is_null() & ((pl.col("attempts").fill_null(0) > 1) | (pl.col("here").fill_null(0) > 1))
    undated = recorded_attempts.filter(several).select(*RECORDED_GPUS).unique(maintain_order=True)
    return recorded.join(
        undated, on=list(ALLOCATION_GPUS), how="anti", nulls_equal=True, maintain_order="left"
    ), undated


def _with_twins(pairs: pl.DataFrame, runs: pl.DataFrame, twins: pl.DataFrame) -> pl.DataFrame:
    """Return ``pairs`` and, for devices that have a better name (``slots.twins``) during the run, pairs with that."""
    during = (pl.col("from_ms") < pl.col("end_ms")) & (pl.col("to_ms") > pl.col("start_ms"))
    more = pairs.join(twins, on="at").join(runs.select("run", "start_ms", "end_ms"), on="run").filter(during)
    more = more.select("run", pl.col("other").alias("at"), "mapping")
    return pl.concat([pairs, more]).unique(["run", "at"], keep="first", maintain_order=True)


def _fully_mapped(pairs: pl.DataFrame, runs: pl.DataFrame, devices: pl.DataFrame) -> pl.DataFrame:
    """Return the runs with all of their GPUs in ``pairs``."""
    counts = pairs.join(devices, on="at").group_by("run").agg(pl.col("slot").n_unique())
    return counts.join(runs.select("run", "gpus"), on="run").filter(pl.col("slot") >= pl.col("gpus"))


def _parents(table: pl.DataFrame) -> pl.DataFrame:
    """Return ``at``, ``from``, ``to``: whole-GPU series of GPUs that had MIG instances, and when they had them."""
    children = table.filter(pl.col("mig").is_not_null())
    wholes = table.filter(pl.col("mig").is_null())
    spans = [
        wholes.filter(pl.col(mark).is_not_null())
        .join(children.select("cluster", "node", mark, "first", "last"), on=["cluster", "node", mark], nulls_equal=True)
        .select("at", pl.col("first_right").alias("from"), pl.col("last_right").alias("to"))
        for mark in ("uuid", "pci", "index")
    ]
    return pl.concat(spans).group_by("at").agg(pl.col("from").min(), pl.col("to").max())


def _without(pairs: pl.DataFrame, runs: pl.DataFrame, parents: pl.DataFrame) -> pl.DataFrame:
    """Drop the pairs with a parent GPU that had MIG instances during the run."""
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


def _as_mismatches(beyond: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    return beyond.join(runs.select("run", "job_id"), on="run").join(table.select("at", "node"), on="at").select(
        pl.col("job_id").cast(pl.String).alias("job"), "node", pl.col("weight").alias("rows")
    )  # fmt: skip


def by_labels(
    runs: pl.DataFrame, nodes: pl.DataFrame, table: pl.DataFrame, labels: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the labeled pairs, and the labels that match no run.

    A label is a raw job ID or a job ID as Slurm displays it (``123_4``, ``123+1``, with a step). It matches a run with
    this ID in the same cluster, on the same node, while the label was present. A plain number that is not a raw job ID
    there is the ID of an array or a heterogeneous job.
    """
    recorded_tasks = (
        _job_ids(labels.with_row_index("label"))
        .join(table.select("at", "cluster", "node"), on="at", maintain_order="left")
        .with_columns(
            pl.col("first").dt.epoch("ms").alias("first_ms"),
            pl.col("last").dt.epoch("ms").alias("last_ms"),
        )
    )
    plain = recorded_tasks.filter(pl.col("task").is_null() & pl.col("het").is_null())
    exact = [
        _fits(plain, runs, nodes, ["id"], ["job_id"]),
        _fits(recorded_tasks.drop_nulls("task"), runs, nodes, ["id", "task"], ["array_job_id", "array_task_id"]),
        _fits(recorded_tasks.drop_nulls("het"), runs, nodes, ["id", "het"], ["het_job_id", "het_offset"]),
    ]
    rest = plain.join(exact[0], on="label", how="anti", maintain_order="left")
    led = [_fits(rest, runs, nodes, ["id"], [leader]) for leader in ("array_job_id", "het_job_id")]
    fitting = pl.concat(
        [
            frame.with_columns(pl.lit(leader).alias("leader"))
            for part, leader in ((exact, False), (led, True))
            for frame in part
        ]
    ).unique(["label", "run"])
    # A job that accounting saw running may have been requeued since: a later label says nothing about this run.
    pairs = (
        fitting.filter(pl.col("counted"))
        .group_by("run", "at")
        .agg(
            pl.col("rows").sum().alias("weight"),
            pl.col("leader").all(),
            pl.col("first_ms").min(),
            pl.col("last_ms").max(),
        )
    )
    unfit = recorded_tasks.join(fitting, on="label", how="anti", maintain_order="left")
    return pairs.sort("run", "at"), unfit.select("job", "node", "first", "last", "rows")


def _job_ids(labels: pl.DataFrame) -> pl.DataFrame:
    """Add ``id``, ``task`` and ``het``, the parts of the job ID ``job``. Plain numbers need no regular expression."""
    number, digits = pl.col("job").cast(pl.Int64, strict=False), pl.col("job").str.len_bytes()
    plain = (number >= 0) & (digits <= identifiers.MOST_DIGITS) & ~pl.col("job").str.contains_any(["+", "-"])
    numbered = labels.with_columns(pl.when(plain).then(number).alias("id"))
    parts = pl.col("job").str.extract_groups(identifiers.PATTERN)
    fields = {"id": "1", "task": "2", "het": "4"}
    unidentified = numbered.filter(pl.col("id").is_null()).with_columns(
        parts.struct.field(field).cast(pl.Int64, strict=False).alias(name) for name, field in fields.items()
    )
    return pl.concat([numbered.drop_nulls("id"), unidentified], how="diagonal").sort("label")


def _fits(
    labels: pl.DataFrame, runs: pl.DataFrame, nodes: pl.DataFrame, label_keys: list[str], run_keys: list[str]
) -> pl.DataFrame:
    """Return ``label``, ``run``, ``at``, ``rows``, ``first_ms``, ``last_ms`` of matches in ID, cluster, node and time.

    ``counted``: whether the label was there in the time of the run that counts.
    ``label_keys``, ``run_keys``: the ID columns of ``labels`` and ``runs``.
    """
    if labels.is_empty():  # as often: most labels are plain numbers
        runs, nodes = runs.clear(), nodes.clear()
    columns = ["run", "cluster", "begin_ms", "finish_ms", "end_ms", *run_keys]
    candidates = labels.join(runs.select(columns), left_on=label_keys, right_on=run_keys, suffix="_run").filter(
        _same_cluster("cluster", "cluster_run")
        & (pl.col("first_ms") < pl.col("finish_ms"))
        & (pl.col("last_ms") >= pl.col("begin_ms"))
    )
    counted = (pl.col("first_ms") < pl.col("end_ms")).alias("counted")
    return _on_its_nodes(candidates, nodes).select("label", "run", "at", "rows", "first_ms", "last_ms", counted)


def _same_cluster(column: str, other_column: str) -> pl.Expr:
    return pl.col(column).is_null() | pl.col(other_column).is_null() | (pl.col(column) == pl.col(other_column))


def _on_its_nodes(candidates: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """Keep the ``candidates`` (``run``, ``node``) on a node of the run; an unknown node matches any."""
    unsaid = candidates.filter(pl.col("node").is_null()).select(candidates.columns)
    nowhere = candidates.filter(pl.col("node").is_not_null()).join(nodes, on="run", how="anti")
    on_nodes = candidates.join(nodes, on=["run", "node"], how="semi")
    return pl.concat([on_nodes, unsaid, nowhere])


@dataclass(frozen=True, slots=True)
class _Records:
    """GPUs that records name."""

    pairs: pl.DataFrame
    """``run``, ``at``; without runs with ambiguous records."""
    gpu_counts: pl.DataFrame
    """``run``, ``node``, ``gpus``: GPUs named on each node, including those without samples."""
    complete: pl.Series
    """Runs with all of their GPUs in records."""
    open: pl.DataFrame
    """``run``: runs with ambiguous records."""
    named: pl.Series
    """Runs with a record."""


def records_of(runs: pl.DataFrame, nodes: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """Return ``recorded`` with the ``mark`` and the ``run`` of each record, and the times of the run."""
    records = (
        recorded.join(_marks(recorded), on="gpu")
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
    return _on_its_nodes(records, nodes)


def by_record(  # noqa: PLR0917
    runs: pl.DataFrame,
    nodes: pl.DataFrame,
    table: pl.DataFrame,
    names: pl.DataFrame,
    recorded: pl.DataFrame,
    parents: pl.DataFrame,
) -> _Records:
    """Return the GPUs that recorded IDs name.

    An ID is a UUID (also of a MIG instance), a PCI address or an index on the node. Records that name more GPUs than
    the run has are ambiguous, and so is the ID of a GPU with more MIG instances than that, or a PCI address or an index
    that several GPUs had during the run (``names``): indices shift when a node starts without one of its GPUs.
    """
    if recorded.is_empty():
        none = pl.Series("run", [], pl.Int64)
        return _Records(pl.DataFrame(schema=MATCH), pl.DataFrame(schema=_NAMED), none, none.to_frame(), none)
    needed = records_of(runs, nodes, recorded).drop("cluster")
    numbered = names.filter(pl.col("column").is_in(["pci", "index"])).join(
        table.select("device", "at", "cluster", "node"), on="device"
    )
    ways = [
        frame.select("at", "cluster", "node", "first", "last", pl.col(name).str.to_uppercase().alias("mark"))
        for frame, name in ((table, "uuid"), (numbered, "value"))
    ]
    # Only UUIDs: an instance's number on its GPU is not an index on the node.
    instances = table.filter(pl.col("mig").str.starts_with("MIG-"))
    ways.append(
        instances.select("at", "cluster", "node", "first", "last", pl.col("mig").str.to_uppercase().alias("mark"))
    )
    marked = pl.concat(ways).drop_nulls("mark")
    # Without a node, only a UUID identifies a GPU; an index or a PCI address does not.
    unsaid = needed.filter(pl.col("node").is_null() & pl.col("mark").str.contains("^(?:GPU|MIG)-"))
    matches = pl.concat(
        [
            needed.join(marked, on=["node", "mark"], suffix="_gpu").select(*_MATCH_COLUMNS),
            unsaid.join(marked, on="mark", suffix="_gpu").select(*_MATCH_COLUMNS),
        ]
    )
    matches = matches.filter(_same_cluster("cluster_run", "cluster") & _seen_during())
    unseen = (
        needed.drop_nulls("node").join(matches, on=["run", "mark"], how="anti").select("run", "node", "mark").unique()
    )
    matches = _without(matches, runs, parents)
    least = _least_named(matches, needed, runs, table)
    ambiguous = pl.concat(
        [least.filter(pl.col("least") > pl.col("gpus")).select("run"), _several_places(matches, table)]
    ).unique(maintain_order=True)
    matches = matches.join(ambiguous, on="run", how="anti", maintain_order="left")
    pairs = matches.group_by("run", "at").agg(pl.len().cast(pl.Int64).alias("weight"))
    node_slots = (
        pairs.join(table.select("at", "node", "slot"), on="at").unique(["run", "node", "slot"]).select("run", "node")
    )
    by_node = pl.concat([node_slots, unseen.select("run", "node")]).group_by("run", "node")
    return _Records(
        pairs.sort("run", "at").select(*MATCH),
        by_node.agg(pl.len().cast(pl.Int64).alias("gpus")),
        least.filter(pl.col("least") == pl.col("gpus"))["run"],
        ambiguous,
        needed["run"].unique(),
    )


def _several_places(matches: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """Return ``run``: runs with a record that names several GPUs, other than one after the other in a slot."""
    slot = pl.col("slot").struct
    gpu = pl.struct("node", slot.field("place"), slot.field("own")).n_unique()
    marks = matches.join(table.select("at", "node", "slot", "mig"), on="at").filter(pl.col("mig").is_null())
    return marks.group_by("run", "node", "mark").agg(gpu.alias("gpus")).filter(pl.col("gpus") > 1).select("run")


def _highest(names: pl.DataFrame) -> pl.DataFrame:
    """Return ``device``, ``highest``: the highest index that the metrics have given to the device."""
    indices = names.filter(pl.col("column") == "index")
    return indices.group_by("device").agg(pl.col("value").cast(pl.Int64).max().alias("highest"))


def _least_named(matches: pl.DataFrame, needed: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """Return ``run``, ``gpus``, ``least``: the minimum number of GPUs that the records of a run with GPUs name.

    Two names of one kind (UUID, PCI address, index) are two GPUs; a UUID and an index may be the same one.
    """
    matched_slots = matches.join(table.select("at", "node", "slot"), on="at").group_by("run")
    kind = pl.when(pl.col("mark").str.contains(":")).then(1).when(pl.col("mark").str.contains("^[0-9]+$")).then(2)
    by_kind = needed.group_by("run", kind.otherwise(0).alias("kind")).agg(
        pl.struct("node", "mark").n_unique().alias("least")
    )
    counts = [matched_slots.agg(pl.struct("node", "slot").n_unique().alias("least")), by_kind.select("run", "least")]
    return (
        pl.concat(counts)
        .group_by("run")
        .agg(pl.col("least").max())
        .join(runs.filter(pl.col("gpus") > 0).select("run", "gpus"), on="run")
    )


_NAMED = {"run": pl.Int64(), "node": pl.String(), "gpus": pl.Int64()}
_MATCH_COLUMNS = ("run", "at", "mark", "cluster_run", "cluster", "first", "last", "start_ms", "end_ms")


def _marks(recorded: pl.DataFrame) -> pl.DataFrame:
    """Return ``gpu``, ``mark``: each recorded name, and as it is compared."""
    return pl.DataFrame({"gpu": recorded["gpu"].unique()}, schema={"gpu": pl.String()}).with_columns(
        pl.col("gpu").map_elements(_mark, return_dtype=pl.String, skip_nulls=True).alias("mark")
    )


def _mark(gpu: str) -> str:
    return pci_address(gpu) or gpu.strip().upper()


def _seen_during() -> pl.Expr:
    """True if the samples of the device (``first``, ``last``) overlap the run (``start_ms``, ``end_ms``)."""
    return (pl.col("first").dt.epoch("ms") < pl.col("end_ms")) & (pl.col("last").dt.epoch("ms") >= pl.col("start_ms"))


def by_whole_node(  # noqa: PLR0917
    runs: pl.DataFrame,
    sure: pl.DataFrame,
    nodes: pl.DataFrame,
    every: pl.DataFrame,
    table: pl.DataFrame,
    recorded: pl.DataFrame,
    known_pairs: pl.DataFrame,
    recorded_there: pl.DataFrame,
    with_evidence: pl.Series,
    maybe: pl.DataFrame | None,
) -> pl.DataFrame:
    """Return the pairs of runs that had every GPU of a node.

    ``sure``: the runs without ambiguous evidence; ``every``: ``table`` and the devices of earlier days, with slots.
    Only nodes without a GPU named by ``known_pairs`` (``run``, ``at``) or ``recorded_there`` (``run``, ``node``,
    ``gpus``) are considered. The GPUs of a node are the slots with samples in the interval or in the days before it
    (``earlier``). If accounting or a record shows more GPUs than that, their number is unknown, and so are the run's
    GPUs. ``with_evidence``: the runs with a label or a record, which may have had GPUs without GPUs in accounting.
    """
    known_slots = known_pairs.join(every.select("at", "node", "slot"), on="at").group_by("run", "node")
    named = pl.concat([known_slots.agg(pl.col("slot").n_unique().cast(pl.Int64).alias("gpus")), recorded_there])
    named = named.group_by("run", "node").agg(pl.col("gpus").max())
    missing = pl.col("gpus").fill_null(0) - pl.col("named").fill_null(0)
    asking = (
        sure.join(named.group_by("run").agg(pl.col("gpus").sum().alias("named")), on="run", how="left")
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
    presence = (
        places.select("run", "node", "cluster", "start_ms", "end_ms")
        .join(every.rename({"cluster": "of"}), on="node")
        .filter(_same_cluster("cluster", "of"))
        .with_columns((_seen_during() & (pl.col("at") < table.height)).alias("seen"))
    )
    presence = _without(presence, runs, _parents(every))
    node_gpus = _gpus_of_nodes(presence)
    at_least = _fewest_gpus(runs, nodes, recorded, every)
    count = node_gpus.group_by("run", "node").agg(
        pl.col("slot").n_unique().cast(pl.Int64).alias("there"), pl.col("seen").any()
    )
    numbered = presence.group_by("run", "node").agg((pl.col("highest").max() + 1).alias("numbered"))
    places = (
        places.join(count, on=["run", "node"], how="left")
        .join(numbered, on=["run", "node"], how="left")
        .join(_crowded(runs, nodes, with_evidence, maybe), on=["run", "node"], how="left")
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
    pairs = node_gpus.filter("seen").join(good, on=["run", "node"], how="semi")
    return pairs.select("run", "at", pl.lit(0, dtype=pl.Int64).alias("weight")).sort("run", "at")


def _gpus_of_nodes(presence: pl.DataFrame) -> pl.DataFrame:
    """Return the devices of ``presence`` with samples during the run, and one device of each other GPU slot.

    A GPU is counted once, even if it was divided into MIG instances before or after.
    """
    divided = pl.col("mig").is_not_null()
    present = presence.filter("seen")
    other_places = present.select("run", "node", "place", divided.alias("other"))
    unseen = (
        presence.filter(~pl.col("seen"))
        .join(present, on=["run", "node", "slot"], how="anti")
        .unique(["run", "node", "slot"])
        .with_columns((~divided).alias("other"))
        .join(other_places, on=["run", "node", "place", "other"], how="anti")
    )
    columns = ("run", "node", "slot", "at", "seen")
    return pl.concat([present.select(columns), unseen.select(columns)])


def _fewest_gpus(runs: pl.DataFrame, nodes: pl.DataFrame, recorded: pl.DataFrame, every: pl.DataFrame) -> pl.DataFrame:
    """Return ``cluster``, ``node``, ``least``: the number of GPUs that a node may have.

    By accounting: the GPUs allocated at the same time to runs on only this node. By records: the GPUs that they name on
    the node, and the highest index + 1. Names of one slot in ``every`` are one GPU; a name that the metrics lack may be
    another one.
    """
    alone = nodes.filter(pl.len().over("run") == 1).join(
        runs.filter(pl.col("gpus") > 0).select("run", "cluster", "gpus", "start_ms", "end_ms"), on="run"
    )
    alone, places = _numbered(alone)
    changes = pl.concat(
        [
            alone.select("place", pl.col("start_ms").alias("ms"), pl.col("gpus").alias("change")),
            alone.select("place", pl.col("end_ms").alias("ms"), (-pl.col("gpus")).alias("change")),
        ]
    )
    # At equal times, ends sort before starts. The changes of each node add up to 0: the sum needs no groups.
    slot_counts = changes.sort("place", "ms", "change").with_columns(pl.col("change").cum_sum().alias("least"))
    most = slot_counts.group_by("place").agg(pl.col("least").max())
    bounds = [most.join(places, on="place").select("cluster", "node", "least")]
    if not recorded.is_empty():
        named = _records_of_known_jobs(recorded.drop_nulls("node"), runs)
        index = pl.col("mark").str.extract(r"^([0-9]{1,4})$").cast(pl.Int64)
        bounds += [
            named.select("cluster", "node", (index + 1).alias("least")),
            named.join(_slots_by_mark(every), on=["node", "mark"], how="left")
            .with_columns(pl.coalesce("slot", "mark").alias("gpu"))
            .group_by("cluster", "node")
            .agg(pl.col("gpu").n_unique().cast(pl.Int64).alias("least")),
        ]
    return pl.concat(bounds).group_by("cluster", "node").agg(pl.col("least").max())


def _records_of_known_jobs(recorded: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return ``cluster``, ``node``, ``mark`` of the records of the jobs of ``runs``."""
    clusters = runs.select("job_id", pl.col("cluster").alias("of")).unique()
    return (
        recorded.join(clusters, on="job_id")
        .filter(_same_cluster("cluster", "of"))
        .select(pl.col("of").alias("cluster"), pl.col("node").str.split(".").list.first(), "gpu")
        .join(_marks(recorded), on="gpu")
        .select("cluster", "node", "mark")
    )


def _slots_by_mark(every: pl.DataFrame) -> pl.DataFrame:
    """Return ``node``, ``mark``, ``slot``: the number of a slot of the node that has the name."""
    numbered = every.with_columns(pl.struct("node", "slot").rank("dense").cast(pl.String).alias("slot"))
    # An instance's number on its GPU is not an index on the node.
    instances = numbered.filter(pl.col("mig").str.starts_with("MIG-"))
    ways = [
        frame.select("node", pl.col(name).cast(pl.String).str.to_uppercase().alias("mark"), "slot")
        for frame, name in ((numbered, "uuid"), (numbered, "pci"), (numbered, "index"), (instances, "mig"))
    ]
    return pl.concat(ways).drop_nulls("mark").unique(["node", "mark"], keep="first", maintain_order=True)


_STAY = ("run", "cluster", "start_ms", "end_ms")


def _numbered(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Add ``place``, the number of the node, which is sorted faster than its names. Return the numbers as well."""
    places = frame.select("cluster", "node").unique().with_row_index("place")
    return frame.join(places, on=["cluster", "node"], nulls_equal=True), places


def _crowded(
    runs: pl.DataFrame, nodes: pl.DataFrame, with_evidence: pl.Series, maybe: pl.DataFrame | None
) -> pl.DataFrame:
    """Return ``run``, ``node``, ``crowded``: whether another run may have had GPUs of the node at the same time."""
    with_gpus = runs.filter((pl.col("gpus").fill_null(0) > 0) | pl.col("run").is_in(with_evidence.implode()))
    stays = nodes.join(with_gpus.select(*_STAY), on="run")
    if maybe is not None:
        longer = maybe.select(stays.columns)
        stays = pl.concat([stays.join(longer, on=["run", "node"], how="anti"), longer])
    stays = (
        _numbered(stays)[0]
        .sort("place", "start_ms", "end_ms", "run")
        .with_columns(
            pl.col("end_ms").cum_max().shift().over("place").alias("before"),
            pl.col("start_ms").shift(-1).over("place").alias("after"),
        )
    )
    crowded = (pl.col("before") > pl.col("start_ms")).fill_null(value=False) | (
        pl.col("after") < pl.col("end_ms")
    ).fill_null(value=False)
    return stays.select("run", "node", crowded.alias("crowded"))
