"""``slurm-affinode images``: list, verify and prune the checkpoint images in the image stores of this node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from slurm_affinode.agent.settings import node_name
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.text import size, span
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.users import name_of_user
from slurm_affinode.checkpoint.files import deleted_files
from slurm_affinode.checkpoint.image.manifest import load_key, summary
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, Usage
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.retention import Tier
from slurm_affinode.checkpoint.store.tiers import Tiers, open_tiers
from slurm_affinode.cli.command import group
from slurm_affinode.cli.node_options import config_file
from slurm_affinode.cli.options import clock, echo, json_option, print_json, print_table, progress, warn, zone
from slurm_affinode.model.suspension import Manifest
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, Check
from slurm_affinode.slurm.client import open_client
from slurm_affinode.suspension.records.shared_state import Notes, vouched
from slurm_affinode.suspension.records.sweep import STOPPED_HINT, Absence, Absences, ImageSweep, StoppedSweep

_EPILOG = """\b
Only root can read the stores: an image holds the memory of a user's job.
  slurm-affinode images list                 images in this node's memory, on its disk, and in the shared store
  slurm-affinode images verify               read all of them; exit status 1 if one is damaged
  slurm-affinode images verify 123           those of one job
  slurm-affinode images prune --dry-run      images of ended jobs, superseded images, interrupted writes
"""
_NAME = re.compile(r"(?:(?P<cluster>[A-Za-z0-9_-]+)\.)?(?P<job>\d+)")


@group(epilog=_EPILOG)
def images() -> None:
    """List, verify and prune the images of suspended jobs."""


@images.command("list")
@click.argument("jobs", nargs=-1)
@json_option
@config_file
def list_images(*, config: Config, jobs: tuple[str, ...], as_json: bool) -> int:
    """Show the images and the usage of the stores. Files are not read; see "verify".

    JOBS are job IDs, or CLUSTER.JOBID. Exit status 1 if an image is damaged, the sweep of images waits for an
    administrator, or a note beside the shared store is not signed by a node.
    """
    with _tiers(config) as tiers:
        listing = _list_images(tiers, jobs)
        signer = signer_of(config)
        absences = absences_of(config, signer)
        notes_of(config, signer, tiers).all()
        listing = replace(
            listing, unknown=absences.all(), stopped=absences.stopped(),
            refused=[f"{path}: {why}" for path, why in sorted(signer.refused().items())],
        )  # fmt: skip
    if as_json:
        print_json(_as_json(listing))
    else:
        _print(listing)
    return 1 if listing.damaged or listing.stopped is not None or listing.refused else 0


@dataclass(frozen=True, slots=True)
class _ImageListing:
    """The contents of the stores."""

    sound: Sequence[tuple[Tier, Image]]
    begun: Sequence[tuple[Tier, Manifest, int]]
    """Incomplete copies (in progress or abandoned), with the number of bytes written."""
    damaged: Sequence[str]
    usage: Sequence[tuple[Tier, Usage]]
    missing: Sequence[str]
    """Stores that cannot be used, with reasons."""
    unknown: Mapping[str, Absence] = field(default_factory=dict)
    """Jobs that Slurm does not know."""
    stopped: StoppedSweep | None = None
    refused: Sequence[str] = ()
    """Files beside the shared store that are not signed by a node."""


def _list_images(tiers: Tiers, jobs: tuple[str, ...]) -> _ImageListing:
    selected = _JobSelection.of(jobs)
    chosen = [(tier, image) for tier in tiers.tiers for image in _chosen(tier.store, selected)]
    damaged = [f"{image}, in {tier.store.path}" for tier, image in chosen if isinstance(image, ImageDamaged)]
    damaged += [
        f"{name}: set aside, in {tier.store.path}"
        for tier in tiers.tiers
        for name in tier.store.aside()
        if selected.has(name.partition("/")[0])
    ]
    return _ImageListing(
        sound=[(tier, image) for tier, image in chosen if isinstance(image, Image)],
        begun=[
            (tier, facts, held_bytes)
            for tier in tiers.tiers
            for facts, held_bytes in tier.store.begun(growing=True)
            if selected.has(facts.key.name)
        ],
        damaged=damaged,
        # Stores without usage are left out: unreadable images are listed as damaged.
        usage=[(tier, usage) for tier in tiers.tiers if (usage := _usage(tier.store)) is not None],
        missing=tiers.missing,
    )


def _as_json(listing: _ImageListing) -> dict[str, Any]:
    return {
        "images": [
            {"store": str(tier.store.path), "tier": tier.name, **summary(image.manifest)}
            for tier, image in listing.sound
        ],
        "partial": [
            {"store": str(tier.store.path), "tier": tier.name, "held": held_bytes, **summary(facts)}
            for tier, facts, held_bytes in listing.begun
        ],
        "damaged": list(listing.damaged),
        "stores": [
            {"path": str(tier.store.path), "tier": tier.name, "used": usage.used, "free": usage.free,
             "quota": usage.quota, "images": usage.images, "by_user": usage.by_user}
            for tier, usage in listing.usage
        ],
        "missing": list(listing.missing),
        "unknown": [
            {"job": name, "unknown_s": round(absence.age_s), "confirmed": absence.confirmed}
            for name, absence in sorted(listing.unknown.items())
        ],
        "stopped": None if listing.stopped is None else str(listing.stopped),
        "refused": list(listing.refused),
    }  # fmt: skip


def _print(listing: _ImageListing) -> None:
    print_table(
        ("job", "seq", "user", "from", f"dumped ({zone()})", "GPUs", "GPU memory", "size", "tiers"),
        _rows(listing.sound, listing.begun),
        right=("seq", "GPUs", "GPU memory", "size"),
        whole=(f"dumped ({zone()})",),
        minor=("seq", "GPU memory", "GPUs", f"dumped ({zone()})", "from"),
    )
    for tier, usage in listing.usage:
        limit = "" if usage.quota is None else f" of {size(usage.quota)}"
        what = f"{usage.images} images, {size(usage.used)}{limit} used, {size(usage.free)} free"
        echo(f"{tier.name}: {tier.store.path}: {what}")
    for error in listing.damaged:
        warn(f"damaged: {error}")
    for name, absence in sorted(listing.unknown.items()):
        warn(f"{name}: Slurm has not known this job for {span(absence.age_s)}")
    for why in listing.refused:
        warn(f"ignored: {why}")
    if listing.stopped is not None:
        warn(f"{listing.stopped} ({STOPPED_HINT})")
    _warn_of(listing.missing)


def _warn_of(missing: Sequence[str]) -> None:
    for why in missing:
        warn(f"not used: {why}")


def _usage(store: DirectoryStore) -> Usage | None:
    try:
        return store.usage()
    except CheckpointError:
        return None


def _rows(
    sound: Sequence[tuple[Tier, Image]], begun: Sequence[tuple[Tier, Manifest, int]]
) -> Iterator[tuple[object, ...]]:
    """Yield a row per checkpoint image, with the tiers that have it."""
    images: dict[tuple[str, int], tuple[Manifest, list[str]]] = {}
    for tier, image in sound:
        facts = image.manifest
        images.setdefault((facts.key.name, facts.seq), (facts, []))[1].append(tier.name)
    for tier, facts, held_bytes in begun:
        where = f"{tier.name} {min(99, 100 * held_bytes // max(1, facts.size))}%"  # held includes the manifest
        images.setdefault((facts.key.name, facts.seq), (facts, []))[1].append(where)
    for _, (facts, tiers) in sorted(images.items()):
        dumped = datetime.fromtimestamp(facts.dumped_epoch, UTC)
        yield (
            facts.key.name, facts.seq, name_of_user(facts.uid), facts.node, clock(dumped, seconds=True),
            sum(gpu.allocated for gpu in facts.gpus), size(facts.gpu_bytes), size(facts.size), ", ".join(tiers),
        )  # fmt: skip


@images.command()
@click.argument("jobs", nargs=-1)
@click.option("--quiet", is_flag=True, help="Show no progress bar")
@json_option
@config_file
def verify(*, config: Config, jobs: tuple[str, ...], quiet: bool, as_json: bool) -> int:
    """Read images completely: signature, owners, modes, links, and the digest of every file.

    JOBS are job IDs, or CLUSTER.JOBID [default: all images]. Exit status 1 if an image is damaged, or a job has none.
    """
    with _tiers(config) as tiers:
        selected = _JobSelection.of(jobs)
        chosen = [(store, image) for store in tiers.stores for image in _chosen(store, selected)]
        total = sum(image.manifest.size for _, image in chosen if isinstance(image, Image))
        with progress("verify", total, quiet=quiet or as_json, of_bytes=True) as advance:
            looked_at = [_verified(store, image, advance) for store, image in chosen]
        results = [result for result in looked_at if result is not None]
        not_used = tiers.missing
    if as_json:
        print_json({"images": results, "missing": list(not_used)})
    else:
        for result in results:
            echo(f"{result['store']}: " + (result["problem"] or f"{result['image']}: ok"))
        if not results:
            echo("no images")
        _warn_of(not_used)
    missing = jobs and not results
    return 1 if missing or any(result["problem"] for result in results) else 0


def _verified(
    store: DirectoryStore, image: Image | ImageDamaged, advance: Callable[[int], None]
) -> dict[str, Any] | None:
    """Verify an image and return the result; ``None`` if it was deleted meanwhile because its job ended."""
    name = problem = None
    try:
        if isinstance(image, ImageDamaged):
            raise image
        name = f"{image.job}/{image.entry}"
        store.verify(image, progress=advance)
    except CheckpointError as error:  # damaged, or this machine cannot compute its digests
        if isinstance(image, Image) and not store.has(image):
            return None
        problem = str(error) + (f" ({error.hint})" if error.hint else "")
    return {"store": str(store.path), "image": name, "problem": problem}


@images.command()
@click.argument("jobs", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed")
@click.option("--yes", is_flag=True, help="Confirm the loss of these jobs' work (with JOBS or --unknown)")
@click.option("--unknown", is_flag=True, help="Also remove all images of jobs unknown to Slurm")
@click.option(
    "--young", default="10m", show_default=True, metavar="SPAN", help="Keep younger images: their jobs may be new"
)
@json_option
@config_file
def prune(
    *, config: Config, jobs: tuple[str, ...], dry_run: bool, yes: bool, unknown: bool, young: str, as_json: bool
) -> int:
    """Remove images of ended jobs, superseded images, and the remains of interrupted writes.

    The agent does so by itself.

    If Slurm does not respond, nothing is removed. Images of jobs unknown to Slurm are kept for
    suspend.keep_unknown. If most images of a store would be removed for that reason, nothing is removed until an
    administrator confirms it, because slurmctld may have lost its state; --unknown --yes confirms it for all nodes.
    Exit status 1 if something could not be removed, or the sweep is stopped.

    With JOBS (job IDs), all images of these jobs are removed, even if a job is suspended: it will start from its
    beginning. Requires --yes.
    """
    young_s = parse_span_s(young)
    if jobs:
        if unknown:
            raise InputError("--unknown cannot be combined with JOBS", hint="leave one of them out")
        return _give_up(config, jobs, dry_run=dry_run, yes=yes, as_json=as_json)
    if unknown and not yes and not dry_run:
        raise InputError("these jobs exist only in their images", hint="add --yes, or --dry-run for a preview")
    with open_client(config.slurm.backend, warned=warn) as slurm, _tiers(config) as tiers:  # type: ignore[arg-type]
        cluster = slurm.config().get("ClusterName") or config.cluster.name
        if not cluster:
            raise AffinodeError("the name of the cluster is not known", hint="set cluster.name in the configuration")
        failed: list[str] = []
        signer = signer_of(config)
        notes, absences = notes_of(config, signer, tiers), absences_of(config, signer, cluster)
        shared = None if tiers.shared is None else tiers.shared.store
        sweep = ImageSweep(
            slurm, cluster, tiers.stores, shared, notes, absences, failed=lambda _, why: failed.append(why)
        )
        swept = sweep.run(young_s=young_s, dry_run=dry_run or unknown)
        if unknown and not dry_run:
            absences.confirm(swept.unknown)
            swept = sweep.run(young_s=young_s)
        removed = [{"store": str(store.path), "image": name} for store, name in swept.removed]
        if unknown and dry_run:
            removed += [
                {"store": str(store.path), "image": f"{image.job}/{image.entry}"}
                for store in tiers.stores
                for image in store.images()
                if isinstance(image, Image) and image.job in swept.unknown and image.job not in swept.removable_jobs
            ]
        missing = tiers.missing
    waiting = [name for name, _ in sorted(swept.unknown.items()) if name not in swept.removable_jobs]
    status = _print_outcome(
        removed, failed, missing, dry_run=dry_run, as_json=as_json, unknown=() if unknown else waiting,
        stopped=swept.stopped,
    )  # fmt: skip
    return 1 if swept.stopped is not None else status


def _give_up(config: Config, jobs: Sequence[str], *, dry_run: bool, yes: bool, as_json: bool) -> int:
    if not yes and not dry_run:
        raise InputError("these jobs exist only in their images", hint="add --yes, or --dry-run for a preview")
    removed: list[dict[str, str]] = []
    failed: list[str] = []
    selected = _JobSelection.of(jobs)
    with _tiers(config) as tiers:
        images: list[tuple[DirectoryStore, Image | ImageDamaged]] = []
        for store in tiers.stores:
            begun = [Image(facts, str(store.path)) for facts, _ in store.begun() if selected.has(facts.key.name)]
            images += [(store, image) for image in (*_chosen(store, selected), *begun)]
        notes = notes_of(config, signer_of(config), tiers)  # none without a shared store
        noted = [note for note in notes.all() if selected.has(note.key.name)]
        names = {image.job for _, image in images if isinstance(image, Image)}
        selected.check(names | {note.key.name for note in noted})
        for store, image in images:
            if isinstance(image, ImageDamaged):
                warn(f"kept, because it is damaged, and the next restore of its job reports that: {image}")
                continue
            with _trouble(store, failed):
                if not dry_run:
                    deleted_files.gone(store, image)
                    store.discard(image.manifest.key, image.manifest.seq)
                removed.append({"store": str(store.path), "image": f"{image.job}/{image.entry}"})
        missing = tiers.missing
    if not dry_run:
        # Other nodes have copies as well, and the job is still held: their agents read the note.
        for note in noted:
            notes.write(replace(note, given_up=True))
    return _print_outcome(removed, failed, missing, dry_run=dry_run, as_json=as_json)


@contextmanager
def _trouble(store: DirectoryStore, failed: list[str]) -> Iterator[None]:
    """Record an error of a removal in ``failed`` instead of raising it."""
    try:
        yield
    except CheckpointError as error:
        failed.append(f"{store.path}: {error}")
    except OSError as error:
        failed.append(f"{store.path}: {error.strerror}")


def signer_of(config: Config) -> Signer:
    """Return the signer of this node. Raises ``CheckpointError`` if there is no key."""
    return Signer(load_key(config.suspend.key_file, owner=os.geteuid()), node_name(config))


def notes_of(config: Config, signer: Signer, tiers: Tiers) -> Notes:
    """Return the notes beside the shared store."""
    root = None if config.suspend.shared_store is None else config.suspend.shared_store.parent
    return Notes(root, signer, vouched=partial(vouched, tiers))


def absences_of(config: Config, signer: Signer, cluster: str | None = None) -> Absences:
    """Return the agents' record of jobs that Slurm does not know; without ``cluster``, to read those of all."""
    suspend = config.suspend
    root = suspend.journal.parent if suspend.shared_store is None else suspend.shared_store.parent
    return Absences(root, signer, cluster, keep_s=parse_span_s(suspend.keep_unknown))


def shared_images(config: Config) -> Check:
    """Check whether the shared store needs the attention of an administrator."""
    suspend = config.suspend
    if suspend.shared_store is None or not os.access(suspend.key_file, os.R_OK):
        return Check("images", SKIPPED, "only root can check the shared store, on a node with an agent")
    try:
        with _tiers(config) as tiers:
            signer = signer_of(config)
            stopped = absences_of(config, signer).stopped()
            notes_of(config, signer, tiers).all()
    except AffinodeError as error:
        return Check("images", PROBLEM, str(error), error.hint)
    if stopped is not None:
        return Check("images", PROBLEM, str(stopped), STOPPED_HINT)
    refused = [f"{path}: {why}" for path, why in sorted(signer.refused().items())]
    if refused:
        return Check("images", PROBLEM, f"ignored: {refused[0]}", "remove it unless an agent has written it")
    return Check("images", OK, f"{suspend.shared_store}: swept, and all notes beside it are signed")


def _print_outcome(
    removed: Sequence[dict[str, str]], failed: Sequence[str], missing: Sequence[str], *, dry_run: bool, as_json: bool,
    unknown: Sequence[str] = (), stopped: StoppedSweep | None = None,
) -> int:  # fmt: skip
    """Report removed and failed images; return the exit status. ``unknown``: jobs not known to Slurm, images kept."""
    if as_json:
        print_json(
            {
                "removed": [] if dry_run else removed, "would_remove": removed if dry_run else [],
                "failed": list(failed), "missing": list(missing), "unknown": list(unknown),
                "stopped": None if stopped is None else str(stopped),
            }
        )  # fmt: skip
        return 1 if failed else 0
    for entry in removed:
        echo(f"{'would remove' if dry_run else 'removed'} {entry['image']} from {entry['store']}")
    for why in failed:
        warn(f"not removed: {why}")
    for name in unknown:
        warn(f"kept: {name}: Slurm does not know this job")
    if stopped is not None:
        warn(f"{stopped} ({STOPPED_HINT})")
    if not removed and not failed:
        echo("nothing to remove")
    _warn_of(missing)
    return 1 if failed else 0


@contextmanager
def _tiers(config: Config) -> Iterator[Tiers]:
    """Yield the available image stores of this node, fastest first."""
    if os.geteuid() != 0 and not os.access(config.suspend.key_file, os.R_OK):
        raise AffinodeError("only root can read the image stores", hint="sudo slurm-affinode images ...")
    if not config.suspend.key_file.exists():
        raise AffinodeError(
            f"{config.suspend.key_file}: this machine has no key of images",
            hint="run it on a node with the agent; any of them shows the images of the shared store",
        )
    key = load_key(config.suspend.key_file, owner=os.geteuid())
    tiers = open_tiers(config.suspend, key, create=False)
    try:
        yield tiers
    finally:
        for store in tiers.stores:
            store.close()


@dataclass(frozen=True, slots=True)
class _JobSelection:
    """Jobs that the arguments name, ``JOBID`` or ``CLUSTER.JOBID``; all jobs if there are none."""

    jobs: frozenset[tuple[str | None, int]]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> _JobSelection:
        """Raises ``InputError``."""
        jobs = set()
        for job in arguments:
            match = _NAME.fullmatch(job)
            if match is None:
                hint = "give the number that squeue %A shows, for example 123"
                raise InputError(f"{job!r} is not a job ID", hint=hint)
            jobs.add((match["cluster"], int(match["job"])))
        return cls(frozenset(jobs))

    def has(self, name: str) -> bool:
        """Return whether ``CLUSTER.JOBID`` is selected."""
        cluster, _, number = name.rpartition(".")
        return not self.jobs or not self.jobs.isdisjoint({(None, int(number)), (cluster, int(number))})

    def check(self, names: Collection[str]) -> None:
        """Raise ``InputError`` if a number selects jobs of several clusters among ``CLUSTER.JOBID``."""
        for cluster, number in sorted(self.jobs, key=str):
            same = sorted(name for name in names if name.rpartition(".")[2] == str(number))
            if cluster is None and len(same) > 1:
                raise InputError(
                    f"several clusters have images of a job {number}: {', '.join(same)}", hint="name one of these"
                )


def _chosen(store: DirectoryStore, selected: _JobSelection) -> list[Image | ImageDamaged]:
    """Return the images of the selected jobs, sorted by job and sequence number."""
    return [image for image in store.images() if not selected.jobs or selected.has(_job_of(image) or "?.-1")]


def _job_of(image: Image | ImageDamaged) -> str | None:
    if isinstance(image, Image):
        return image.job
    match = re.match(r"[A-Za-z0-9_-]+\.\d+", str(image))
    return match[0] if match else None
