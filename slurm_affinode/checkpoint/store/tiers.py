"""The image stores of a node, fastest first: host memory, local disk, shared file system.

A dump goes to the first tier with room and is copied until it is durable; only then do the processes end. The copy to
the shared tier continues in the background. One thread at a time fetches an image to this node, slowly until a job
waits for it. ``retention.py`` decides what stays where.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from slurm_affinode.base import kernel_text
from slurm_affinode.base.node_config import SuspendConfig, TiersConfig
from slurm_affinode.base.sizes import parse_limit, parse_size
from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError
from slurm_affinode.checkpoint.host_memory import available_memory
from slurm_affinode.checkpoint.image import compression
from slurm_affinode.checkpoint.image.block_io import Limiter
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, ImageUnanswered, NoRoom, Pages
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.retention import Copy, Retention, Tier
from slurm_affinode.checkpoint.store.transfer import CopyMode
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest


class _Pull(Limiter):
    """A rate limit that is lifted when a job waits for the image."""

    def __init__(self, limiter: Limiter) -> None:
        super().__init__(0)
        self._limiter = limiter
        self.needed = threading.Event()
        self.end_event = threading.Event()

    def pass_(self, count: int, over: Callable[[], bool] = lambda: False) -> None:
        """See ``Limiter``."""
        if not self.needed.is_set():
            self._limiter.pass_(count, lambda: self.needed.is_set() or over())


class Pulls:
    """Transfers of images to one node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the pulls in progress."""
        self._under_way: dict[tuple[str, int], _Pull] = {}

    @contextmanager
    def turn(self, image: tuple[str, int], limiter: Limiter, *, needed: bool) -> Iterator[Limiter]:
        """Wait until no other thread transfers this image; yield the rate limit.

        ``needed``: a job waits for it. ``limiter`` is then lifted, also for a transfer that another thread has started.
        """
        new_pull = _Pull(limiter)
        while (running_pull := self._first(image, new_pull)) is not new_pull:
            if needed:
                running_pull.needed.set()
            running_pull.end_event.wait()
        if needed:
            new_pull.needed.set()
        try:
            yield new_pull
        finally:
            with self._lock:
                del self._under_way[image]
            new_pull.end_event.set()

    def _first(self, image: tuple[str, int], new_pull: _Pull) -> _Pull:
        with self._lock:
            return self._under_way.setdefault(image, new_pull)


T = TypeVar("T")
Report = Callable[[JobKey, str], None]
"""Called with a problem of a job's image."""
Fill = Callable[[ImageWriter], Image]
"""Writes an image and commits it."""
Passed = Callable[[str], None]
"""Called with the name of a tier that did not take an image, and the reason."""
LOG = logging.getLogger("slurm_affinode.agent")
_NO_LIMIT = Limiter(0)


def log_problem(key: JobKey, text: str) -> None:
    """Log a problem of a job's image."""
    LOG.warning("job %s: %s", key.job_id, text)


class Tiers:
    """The tiers of one node. Thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        now: Callable[[], float] = time.time,
        report: Report = log_problem,
        missing: Sequence[str] = (),
        to_shared: Limiter = _NO_LIMIT,
        ahead: Limiter = _NO_LIMIT,
    ) -> None:
        """``missing``: why tiers are missing. ``to_shared``, ``ahead``: limits of copies to the shared tier, and of
        those to this node before a job starts.
        """
        self.missing = tuple(missing)
        self.retention = Retention(tiers, now)
        self.report = report
        self._to_shared, self._ahead = to_shared, ahead
        self._pulls = Pulls()
        self.stopping = threading.Event()

    @classmethod
    def of(cls, local: DirectoryStore, shared: DirectoryStore | None) -> Tiers:
        """Return the two tiers that every site has."""
        both = [Tier("disk", local), *([] if shared is None else [Tier("shared", shared, shared=True)])]
        return cls(both)

    def stop(self) -> None:
        """Stop copies that no job waits for; the next agent resumes them."""
        self.stopping.set()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, fastest first."""
        return self.retention.tiers

    @property
    def unresponsive(self) -> tuple[str, ...]:
        """Directories of tiers with a file system that does not respond."""
        return tuple(str(store.path) for store in self.stores if store.calls is not None and store.calls.unresponsive)

    def relieve(self) -> None:
        """Free host memory if the node is short of it."""
        self.retention.relieve()

    def pinned(self, copy: Copy) -> AbstractContextManager[None]:
        """Keep a copy from eviction while it is in use."""
        return self.retention.pinned(copy)

    @property
    def stores(self) -> tuple[DirectoryStore, ...]:
        """The stores, fastest first."""
        return tuple(tier.store for tier in self.tiers)

    @property
    def node(self) -> tuple[Tier, ...]:
        """The tiers that only this node sees."""
        return tuple(tier for tier in self.tiers if not tier.shared)

    @property
    def shared(self) -> Tier | None:
        """The tier that every node sees."""
        return next((tier for tier in self.tiers if tier.shared), None)

    @property
    def shared_store(self) -> DirectoryStore | None:
        """The store that every node sees; ``None``: there is none."""
        return None if self.shared is None else self.shared.store

    # --- writing

    def check_room(self, uid: int, estimate: int) -> None:
        """Check that an image of this size would fit in some tier and in the shared one. Raises ``NoRoom``."""
        shared = self.shared
        if shared is not None:
            shared.store.check_room(uid, estimate)
        why: CheckpointError | None = None
        for tier in (tier for tier in self.tiers if tier.durable):
            try:
                self.retention.check_room(tier, uid, estimate)
            except CheckpointError as error:
                why = why or error
            else:
                return
        raise why or NoRoom("there is no durable image store")

    def write(
        self, key: JobKey, fill: Fill, *, uid: int, estimate: int, at_least: int = 1, passed: Passed = lambda text: None
    ) -> Image:
        """Have ``fill`` write a new image to the fastest tier that takes it, or to the next one if that runs full.

        ``fill`` is called anew for each tier that takes the image, and raises ``NoRoom`` if that runs full. ``uid``,
        ``estimate``, ``at_least``: as of ``DirectoryStore.begin``. ``passed`` is called for each tier that took
        nothing. Raises ``NoRoom`` and the other errors of ``fill``.
        """
        why: list[str] = []
        for tier in self.tiers:
            try:
                self.retention.make_room_for_new(tier, key, estimate)
                writer = tier.store.begin(key, uid=uid, estimate=estimate, at_least=at_least)
            except (CheckpointError, OSError) as error:
                why.append(_text(error))
                passed(f"{tier.name}: {why[-1]}")
                continue
            try:
                with writer:
                    image = fill(writer)
            except NoRoom as error:
                self.report(key, f"the tier {tier.name} ran full while its image was written: {error}")
                why.append(str(error))
            else:
                return image
        if len(why) > 1:
            self.report(key, f"no tier can store its image: {'; '.join(why)}")
        raise NoRoom(why[0] if why else "there is no image store")

    def settle(self, image: Image, *, passed: Passed = lambda text: None) -> Copy:
        """Return a durable copy, making one if needed: the first step after a dump. Raises ``CheckpointError``.

        ``passed``: as of ``write``.
        """
        copies = self._copies_of(image.manifest)
        durable = [copy for copy in copies if copy.tier.durable]
        if durable:
            return durable[0]
        why: CheckpointError | None = None
        for tier in (tier for tier in self.tiers if tier.durable):
            try:
                return self.move(copies[0], tier)
            except IndexError:
                raise ImageDamaged(f"{image.manifest.key.name}: its image is gone") from None
            except ImageDamaged:
                raise
            except CheckpointError as error:
                why = error
                passed(f"{tier.name}: {_text(error)}")
        raise why or NoRoom("there is no durable image store")

    # --- reading

    def copies(self, run: LiveRun) -> tuple[list[Copy], ImageDamaged | None]:
        """Return the images that this attempt may be restored from, with an error if there is damage.

        Newest image first, then fastest tier.
        """
        all_copies: list[Copy] = []
        damage: ImageDamaged | None = None
        for tier in self.tiers:
            try:
                image = tier.store.find(run)
            except ImageDamaged as error:
                damage = error
                self.report(run.key, f"its copy in the tier {tier.name} is damaged: {error}")
            except OSError as error:
                why = f"the tier {tier.name} cannot be read: {_text(error)}"
                if isinstance(error, NoAnswerError):
                    damage = ImageUnanswered(why)
                    continue
                damage = ImageDamaged(why)
                self.report(run.key, why)
            else:
                all_copies += [] if image is None else [Copy(image, tier)]
        # sorted() is stable, so equal images stay in the order of the tiers.
        return sorted(all_copies, key=lambda copy: -copy.image.manifest.seq), damage

    def on_node(self, name: str, seq: int) -> Copy | None:
        """Return the fastest complete copy in a tier of this node."""
        return next((copy for copy in self._all_copies(name, seq) if not copy.tier.shared), None)

    def _copies_of(self, facts: Manifest) -> list[Copy]:
        return [copy for copy in self._all_copies(facts.key.name, facts.seq) if copy.image.manifest == facts]

    def _all_copies(self, name: str, seq: int) -> Iterator[Copy]:
        for tier in self.tiers:
            with suppress(CheckpointError, OSError):
                yield Copy(tier.store.get(name, seq), tier)

    def sound(self, copies: Sequence[Copy], use: Callable[[Copy, Pages], T]) -> T:
        """Call ``use`` with the first valid one of several copies of an image, on this node or brought here.

        Returns the result of ``use`` and passes on its errors. The pages of the copy may still be under verification
        (``DirectoryStore.verifying``), so ``use`` must do nothing irreversible before they are verified. A damaged
        copy, even if the damage is found during use, is set aside and reported, and the next one is tried. Raises
        ``ImageDamaged`` if none is valid.
        """
        damage: list[str] = []
        bad: set[str] = set()
        for number, copy in enumerate(copies):
            why: Exception
            with ExitStack() as stack:
                try:
                    local_copy, pages = self._local_copy(copy, bad, stack)
                except (CheckpointError, OSError) as error:
                    why = error
                else:
                    try:
                        return use(local_copy, pages)
                    except ImageDamaged as error:
                        if local_copy is not copy:  # it was valid when it was brought here
                            raise
                        why = error
            damage.append(f"{copy.tier.name}: {_text(why)}")
            where = f"its copy in the tier {copy.tier.name}"
            if isinstance(why, ImageDamaged):
                self._set_aside(copy, f"{where} is damaged: {why}", drop=len(copies) > number + 1)
            else:
                self.report(copy.image.manifest.key, f"{where} cannot be read: {_text(why)}")
            if copy.tier.store.has(copy.image):
                bad.add(copy.tier.name)
        raise ImageDamaged("; ".join(damage) if len(damage) > 1 else damage[0].partition(": ")[2])

    def _local_copy(self, copy: Copy, bad: Collection[str], stack: ExitStack) -> tuple[Copy, Pages]:
        """Return a copy from which a tree can be restored while ``stack`` is open: this one, or a copy made here."""
        # Through host memory it is read once; through a disk would be slower than from where it is.
        packed = copy.tier.shared and copy.tier.store.packed(copy.image)
        if copy.tier.shared:
            # A damaged or unverified copy still in a tier would be mistaken for the copy made here.
            brought = self.pull(copy, expected_s=0.0, durable=packed, without=bad)
            if brought is not None:
                try:
                    return brought, stack.enter_context(brought.tier.store.verifying(brought.image, is_known=True))
                except ImageDamaged as error:  # the copy was valid when it was made, and its source is
                    raise CheckpointError(str(error)) from None
        if packed:
            raise NoRoom("it is compressed, and no tier of this node has room for it")
        return copy, stack.enter_context(copy.tier.store.verifying(copy.image))

    def _set_aside(self, copy: Copy, why: str, *, drop: bool) -> None:
        """Set a damaged copy aside. ``drop``: there is another copy. The last one stays in place for inspection."""
        key = copy.image.manifest.key
        if not copy.tier.store.has(copy.image):  # it has left the tier meanwhile
            return
        if not drop:
            self.report(key, why)
            return
        try:
            copy.tier.store.set_aside(copy.image)
            self.report(key, f"{why}; set aside, another copy is used")
        except (CheckpointError, OSError) as error:
            self.report(key, f"{why}; it cannot be set aside: {_text(error)}")

    # --- moving

    def move(
        self, copy: Copy, to: Tier, limiter: Limiter = _NO_LIMIT, *, stop: Callable[[], bool] = lambda: False
    ) -> Copy:
        """Copy an image to another tier, verified on the way. Raises ``CheckpointError``, also if it is stopped."""
        facts = copy.image.manifest
        mode = CopyMode(
            limiter,
            # On the way out, a recent dump on the disk is in the page cache; on the way back, it is read only once.
            read_direct=copy.tier.shared or not to.durable,
            write_direct=to.direct,
            level=to.level,
            stop=stop,
        )
        with self.pinned(copy):
            self.retention.make_room_for(to, self.retention.describe_copy(copy, to))
            began = time.monotonic()
            try:
                new_image = copy.tier.store.copy(copy.image, to.store, mode)
            except OSError as error:
                raise NoRoom(f"{to.store.path}: {facts.key.name} cannot be copied: {_text(error)}") from None
            self.retention.measured(copy.tier, facts.size, time.monotonic() - began)
            return Copy(new_image, to)

    def publish(self, name: str, seq: int) -> bool:
        """Copy an image from a valid copy on this node to the shared tier; return whether it is there.

        Raises ``CheckpointError`` if the copy must be retried.
        """
        to = self.shared
        copies = [copy for copy in self._all_copies(name, seq) if not copy.tier.shared]
        if to is None or not copies:
            return False
        for number, copy in enumerate(copies):
            try:
                self.move(copy, to, self._to_shared, stop=self.stopping.is_set)
            except ImageDamaged as error:
                more = len(copies) > number + 1
                self._set_aside(copy, f"its copy in the tier {copy.tier.name} is damaged: {error}", drop=more)
                if not more:
                    raise
            except NoRoom:
                self._yield(copy, to)
                raise
            else:
                break
        return True

    def _yield(self, copy: Copy, to: Tier) -> None:
        """Without room for the rest of a copy, remove its beginning if an older image waits for the same room.

        Otherwise two nodes that fill a store at the same time would wait for each other's space.
        """
        manifest = copy.image.manifest
        with suppress(CheckpointError, OSError):
            begun = [facts for facts, _ in to.store.begun()]
            if manifest in begun and any(_age(facts) < _age(manifest) for facts in begun):
                to.store.cut(copy.image, 0)
                self.report(
                    manifest.key,
                    f"the tier {to.name} is full; the partial copy of its image is removed for another one",
                )

    def repair(self, name: str, seq: int) -> None:
        """Ensure a valid copy in the shared tier, from one on this node. Raises ``CheckpointError``."""
        copies = list(self._all_copies(name, seq))
        for copy in (copy for copy in copies if copy.tier.shared):
            try:
                copy.tier.store.verify(copy.image)
            except ImageDamaged as error:
                with self.pinned(copy):  # an unreadable copy may be the only one
                    if not any(other_copy.is_sound() for other_copy in copies if other_copy is not copy):
                        raise
                    self._set_aside(copy, f"its copy in the tier {copy.tier.name} is damaged: {error}", drop=True)
                    self.publish(name, seq)
                self.report(copy.image.manifest.key, "its damaged shared image was repaired: it can be woken")
            return
        self.publish(name, seq)

    def pull(
        self, copy: Copy, *, expected_s: float | None, durable: bool = True, without: Collection[str] = ()
    ) -> Copy | None:
        """Bring an image to the fastest tier of this node that takes it, or return ``None``. Raises ``ImageDamaged``.

        ``expected_s``: seconds until it is needed. ``durable``: durable tiers are allowed too. ``without``: names of
        excluded tiers.
        """
        faster = self.tiers[: self.tiers.index(copy.tier)]
        takers = [tier for tier in faster if tier.name not in without and (durable or not tier.durable)]
        needed = not expected_s
        with self._pulls.turn(copy.id, self._ahead, needed=needed) as limiter:
            for tier in takers:
                present = next((source for source in self._copies_of(copy.image.manifest) if source.tier is tier), None)
                if present is not None:  # brought here while this call waited for its turn
                    return present
                tier_image = self.retention.describe_copy(copy, tier, expected_s=expected_s)
                try:
                    if not self.retention.may_take(tier, tier_image.size - tier_image.held_bytes):
                        continue
                    with suppress(NoRoom):
                        self.retention.make_room_for(tier, tier_image)
                        return self.move(copy, tier, limiter, stop=lambda: not needed and self.stopping.is_set())
                except ImageDamaged:
                    raise
                except (CheckpointError, OSError) as error:
                    self.report(copy.image.manifest.key, f"not copied to the tier {tier.name}: {_text(error)}")
        return None


def _age(facts: Manifest) -> tuple[float, str, int]:
    """Return a sort key, lower for older images and the same on every node."""
    return facts.dumped_epoch, facts.key.name, facts.seq


def _text(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def open_tiers(
    suspend: SuspendConfig,
    key: bytes,
    *,
    create: bool = True,
    report: Report = log_problem,
    promised: Callable[[], int] = int,
) -> Tiers:
    """Open the tiers of a node, fastest first. ``create``: create missing directories; otherwise omit such tiers.

    ``promised``: return the host memory that suspensions and restores will use; ``OSError``: unknown.

    If the memory tier is not usable, the node works as if it were not configured, with the reason in ``Tiers.missing``.
    Raises ``CheckpointError`` if another one cannot be used.
    """
    config = suspend.tiers
    quota = None if suspend.budget is None else parse_size(suspend.budget)
    user_quota, user_share = parse_limit(suspend.user_quota)
    owner = os.geteuid()
    tiers: list[Tier] = []
    missing: list[str] = []
    if config.memory is not None and (create or config.memory.exists()):
        try:
            tiers.append(_memory_tier(config, config.memory, key, promised, create=create))
        except CheckpointError as error:
            missing.append(str(error))
    elif config.memory is not None:
        missing.append(f"{config.memory}: does not exist")
    places = [("disk", suspend.local_store)]
    if suspend.shared_store is not None:
        places.append(("shared", suspend.shared_store))
    for name, path in places:
        shared = name == "shared"
        # A copy on the node's disk is evicted for another user's as soon as it is in the shared store as well.
        open_store = partial(
            DirectoryStore, path, key, quota=quota, user_quota=user_quota, user_share=user_share if shared else None,
            owner=owner, create=create,
        )  # fmt: skip
        try:
            store = (
                _shared(path, open_store, create=create) if shared else _existing_store(path, open_store, create=create)
            )
        except NoAnswerError as error:
            if create:
                raise CheckpointError(f"{path}: {error.strerror}") from None
            missing.append(f"{path}: {error.strerror}")
            continue
        if store is None:
            missing.append(f"{path}: does not exist")
            continue
        level = config.compress if shared and compression.zstd() is not None else 0
        tiers.append(Tier(name, store, shared=shared, direct=config.direct, level=level))
    _refuse_same_directory(tiers)
    if config.compress and compression.zstd() is None:
        missing.append("images are not compressed: the Python package zstandard is not installed")
    return Tiers(
        tiers, report=report, missing=missing, to_shared=Limiter(_rate(config.copy_rate)),
        ahead=Limiter(_rate(config.pull_rate)),
    )  # fmt: skip


def _refuse_same_directory(tiers: Sequence[Tier]) -> None:
    """Raise ``CheckpointError`` if two tiers share a directory: eviction from one would delete both copies."""
    for first, second in combinations(tiers, 2):
        if first.store.same_as(second.store):
            for tier in tiers:
                tier.store.close()
            raise CheckpointError(
                f"{first.store.path} and {second.store.path} are one directory: "
                f"the tiers {first.name} and {second.name}",
                hint="give each of suspend.local_store, suspend.shared_store and suspend.tiers.memory one of its own",
            )


def _memory_tier(config: TiersConfig, path: Path, key: bytes, promised: Callable[[], int], *, create: bool) -> Tier:
    """Open the tier in host memory, which spares the memory reserved for jobs. Raises ``CheckpointError``."""
    reserve = parse_size(config.memory_reserve)
    quota = parse_size(config.memory_size)

    def free_bytes() -> int | None:
        free = available_memory()
        try:
            return None if free is None else free - reserve - promised()
        except OSError:
            return 0

    store = DirectoryStore(path, key, quota=quota, owner=os.geteuid(), create=create)
    # Other file systems in memory are unsuitable: a ramfs reports no free space, and a hugetlbfs does not support
    # writes.
    if (kind := filesystem(path)) != "tmpfs":
        store.close()
        raise CheckpointError(f"{path}: is on {kind or 'an unknown file system'}, not on a tmpfs")
    if os.statvfs(path).f_blocks == 0:
        store.close()
        raise CheckpointError(
            f"{path}: is on a tmpfs without a limit, so that its free space is unknown", hint="mount it with size="
        )
    return Tier("memory", store, durable=False, available_bytes=free_bytes)


def _existing_store(path: Path, open_store: Callable[..., DirectoryStore], *, create: bool) -> DirectoryStore | None:
    return open_store() if create or path.exists() else None


def _shared(path: Path, open_store: Callable[..., DirectoryStore], *, create: bool) -> DirectoryStore | None:
    """Open the store on a file system of another machine. Raises ``NoAnswerError``."""
    calls = FileSystemCalls(path.parent)

    def read() -> DirectoryStore | None:
        if create and not path.parent.is_dir():
            # Otherwise an empty directory on the node's own disk would pass for a store without images.
            raise CheckpointError(
                f"{path.parent}: does not exist",
                hint=f"mount its file system; if it is new: install -d -m 0700 -o root -g root {path.parent}",
            )
        return _existing_store(path, partial(open_store, calls=calls), create=create)

    return calls(read)


def _rate(text: str | None) -> float:
    return 0.0 if text is None else float(parse_size(text))


def filesystem(path: Path) -> str | None:
    """Return the type of a directory's file system, as named by the kernel, or ``None`` if not known."""
    device = path.stat().st_dev
    needed = f"{os.major(device)}:{os.minor(device)}"
    try:
        for line in kernel_text.lines("/proc/self/mountinfo"):
            before, _, after = line.partition(" - ")
            if before.split()[2] == needed:
                return after.split()[0]
    except (OSError, IndexError):
        pass
    return None
