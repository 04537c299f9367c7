"""The image stores of a node, fastest first: host memory, its own disk, the shared file system.

A dump goes to the first tier that has room, and is copied on until it is durable before its tree goes. From there the
copy to the shared tier goes on by itself. What stays where is decided in ``retention.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TypeVar

from slurm_affinode.checkpoint.blockio import Limiter
from slurm_affinode.checkpoint.copying import How
from slurm_affinode.checkpoint.demand import SharedDemand
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, ImageUnanswered, NoRoom, Pages
from slurm_affinode.checkpoint.pulls import Pulls
from slurm_affinode.checkpoint.retention import Retention
from slurm_affinode.checkpoint.tier import Copy, Tier
from slurm_affinode.checkpoint.writer import ImageWriter
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest
from slurm_affinode.patience import NoAnswerError

T = TypeVar("T")
Fill = Callable[[ImageWriter], Image]
"""Writes an image and commits it."""
Passed = Callable[[str], None]
"""Told of a tier that did not take an image, with its name and why."""
LOG = logging.getLogger("slurm_affinode.agent")
_NO_LIMIT = Limiter(0)


class Tiers:
    """May be used by several threads."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        demand: SharedDemand | None = None,
        now: Callable[[], float] = time.time,
        report: Callable[[JobKey, str], None] = lambda key, text: LOG.warning("job %s: %s", key.job_id, text),
        missing: Sequence[str] = (),
        to_shared: Limiter = _NO_LIMIT,
        ahead: Limiter = _NO_LIMIT,
    ) -> None:
        """``report``: of a job whose image had trouble. ``missing``: why a tier is not there. ``to_shared``,
        ``ahead``: limits of copies to the shared tier, and of those to this node before a job starts.
        """
        self.missing = tuple(missing)
        self.retention = Retention(tiers, demand or SharedDemand(), now)
        self._now, self.report = now, report
        self._to_shared, self._ahead = to_shared, ahead
        self._pulls = Pulls()
        self.stopping = threading.Event()

    @classmethod
    def of(cls, local: DirectoryStore, shared: DirectoryStore | None) -> Tiers:
        """The two tiers that every site has."""
        both = [Tier("disk", local), *([] if shared is None else [Tier("shared", shared, shared=True)])]
        return cls(both)

    def stop(self) -> None:
        """Copies that nobody waits for end soon, to be taken up by the next agent."""
        self.stopping.set()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Fastest first."""
        return self.retention.tiers

    @property
    def silent(self) -> tuple[str, ...]:
        """Directories of tiers whose file system does not answer."""
        patient = (store for store in self.stores if store.patience is not None and store.patience.silent)
        return tuple(str(store.path) for store in patient)

    @property
    def demand(self) -> SharedDemand:
        """How often images are wanted."""
        return self.retention.demand

    def relieve(self) -> None:
        """Give host memory back where the node is short of it."""
        self.retention.relieve()

    def pinned(self, copy: Copy) -> AbstractContextManager[None]:
        """While a copy is in use."""
        return self.retention.pinned(copy)

    @property
    def stores(self) -> tuple[DirectoryStore, ...]:
        """Fastest first."""
        return tuple(tier.store for tier in self.tiers)

    @property
    def node(self) -> tuple[Tier, ...]:
        """Those that only this node sees."""
        return tuple(tier for tier in self.tiers if not tier.shared)

    @property
    def shared(self) -> Tier | None:
        """The one that every node sees."""
        return next((tier for tier in self.tiers if tier.shared), None)

    # --- writing

    def check_room(self, uid: int, estimate: int) -> None:
        """Whether an image of so many bytes would fit: in some tier, and in the shared one. Raises ``NoRoom``."""
        shared = self.shared
        if shared is not None:
            shared.store.check_room(uid, estimate)
        why: CheckpointError | None = None
        for tier in (one for one in self.tiers if one.durable):
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
        """Have ``fill`` write a new image in the fastest tier that takes it; where that runs full, in the next one.

        ``fill`` is called anew for each tier that takes the image, and raises ``NoRoom`` where that ran full. ``uid``,
        ``estimate``, ``at_least``: as of ``DirectoryStore.begin``. ``passed`` is told of each tier that took nothing.
        Raises ``NoRoom``, and what else ``fill`` raises.
        """
        why: list[str] = []
        self.demand.requested(key.name, self._now())
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
                self.retention.took(tier, image.manifest.size)
                return image
        if len(why) > 1:
            self.report(key, f"no tier takes its image: {'; '.join(why)}")
        raise NoRoom(why[0] if why else "there is no image store")

    def settle(self, image: Image, *, passed: Passed = lambda text: None) -> Copy:
        """Have a durable copy: the first thing after a dump. Raises ``CheckpointError`` where that cannot be.

        ``passed``: as of ``write``.
        """
        copies = self._copies_of(image.manifest)
        durable = [copy for copy in copies if copy.tier.durable]
        if durable:
            return durable[0]
        why: CheckpointError | None = None
        for tier in (one for one in self.tiers if one.durable):
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
        """Copies of images that may be put in place of this run, newest image and fastest tier first; what is wrong."""
        found: list[Copy] = []
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
                found += [] if image is None else [Copy(image, tier)]
        # sorted() keeps the order of equals: that of the tiers.
        return sorted(found, key=lambda one: -one.image.manifest.seq), damage

    def on_node(self, name: str, seq: int) -> Copy | None:
        """The fastest complete copy that is on this node alone."""
        return next((copy for copy in self._all(name, seq) if not copy.tier.shared), None)

    def _copies_of(self, facts: Manifest) -> list[Copy]:
        return [one for one in self._all(facts.key.name, facts.seq) if one.image.manifest == facts]

    def _all(self, name: str, seq: int) -> Iterator[Copy]:
        for tier in self.tiers:
            with suppress(CheckpointError, OSError):
                yield Copy(tier.store.get(name, seq), tier)

    def sound(self, copies: Sequence[Copy], use: Callable[[Copy, Pages], T]) -> T:
        """Have ``use`` do something with the first of some copies of one image that is sound: on this node, or brought
        here. What it gives is given back, what it raises is raised.

        Of its copy the pages may still be verified meanwhile (``DirectoryStore.verifying``): ``use`` does nothing that
        cannot be undone before they are sound. A damaged copy, also one that is found to be while it
        is used, is put aside and told, and the next is taken. Raises ``ImageDamaged`` where none is sound.
        """
        damage: list[str] = []
        bad: set[str] = set()
        for number, copy in enumerate(copies):
            why: Exception
            with ExitStack() as stack:
                try:
                    here, pages = self._here(copy, bad, stack)
                except (CheckpointError, OSError) as error:
                    why = error
                else:
                    try:
                        return use(here, pages)
                    except ImageDamaged as error:
                        if here is not copy:  # it was sound when it was brought
                            raise
                        why = error
            damage.append(f"{copy.tier.name}: {_text(why)}")
            where = f"its copy in the tier {copy.tier.name}"
            if isinstance(why, ImageDamaged):
                self._aside(copy, f"{where} is damaged: {why}", drop=len(copies) > number + 1)
            else:
                self.report(copy.image.manifest.key, f"{where} cannot be read: {_text(why)}")
            if copy.tier.store.has(copy.image):
                bad.add(copy.tier.name)
        raise ImageDamaged("; ".join(damage) if len(damage) > 1 else damage[0].partition(": ")[2])

    def _here(self, copy: Copy, bad: Collection[str], stack: ExitStack) -> tuple[Copy, Pages]:
        """A copy that a tree can be restored from while ``stack`` is open: this one, or one brought here."""
        # Through host memory it is read once; through a disk that would be slower than from where it is.
        packed = copy.tier.shared and copy.tier.store.packed(copy.image)
        if copy.tier.shared:
            # A copy that is bad, or not known to be sound, and is still there would be taken for the one brought here.
            brought = self.pull(copy, expected_s=0.0, durable=packed, without=bad)
            if brought is not None:
                try:
                    return brought, stack.enter_context(brought.tier.store.verifying(brought.image, known=True))
                except ImageDamaged as error:  # it was sound when it was brought, and the one it was made from is
                    raise CheckpointError(str(error)) from None
        if packed:
            raise NoRoom("it is compressed, and no tier of this node has room for it")
        return copy, stack.enter_context(copy.tier.store.verifying(copy.image))

    def _aside(self, copy: Copy, why: str, *, drop: bool) -> None:
        """``drop``: another copy is there. The last one stays where it is, for a person to look at."""
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
        """Copy an image to another tier, verified on the way. Raises ``CheckpointError``, also when it has to stop."""
        facts = copy.image.manifest
        how = How(
            limiter,
            # What was dumped to the disk lately is in the page cache on its way out; on its way back it is read once.
            read_direct=copy.tier.shared or not to.durable,
            write_direct=to.direct,
            level=to.level,
            stop=stop,
        )
        with self.pinned(copy):
            self.retention.make_room_for(to, self.retention.held(copy, to))
            began = time.monotonic()
            try:
                made = copy.tier.store.copy(copy.image, to.store, how)
            except OSError as error:
                raise NoRoom(f"{to.store.path}: {facts.key.name} cannot be copied: {_text(error)}") from None
            self.retention.took(to, facts.size)
            self.retention.measured(copy.tier, facts.size, time.monotonic() - began)
            return Copy(made, to)

    def publish(self, name: str, seq: int) -> bool:
        """Copy an image of this node to the shared tier, from a sound copy; whether it is there.

        Raises ``CheckpointError`` where that has to be tried again.
        """
        to = self.shared
        copies = [copy for copy in self._all(name, seq) if not copy.tier.shared]
        if to is None or not copies:
            return False
        for number, copy in enumerate(copies):
            try:
                self.move(copy, to, self._to_shared, stop=self.stopping.is_set)
            except ImageDamaged as error:
                more = len(copies) > number + 1
                self._aside(copy, f"its copy in the tier {copy.tier.name} is damaged: {error}", drop=more)
                if not more:
                    raise
            except NoRoom:
                self._yield(copy, to)
                raise
            else:
                break
        return True

    def _yield(self, copy: Copy, to: Tier) -> None:
        """There is no room for the rest of a copy: where an older image waits for the same, the beginning of this goes.

        Else two nodes that fill a store at the same time would both wait for what the other one has.
        """
        mine = copy.image.manifest
        with suppress(CheckpointError, OSError):
            begun = [facts for facts, _ in to.store.begun()]
            if mine in begun and any(_age(facts) < _age(mine) for facts in begun):
                to.store.cut(copy.image, 0)
                self.report(mine.key, f"the tier {to.name} is full; what was there of its image makes room for another")

    def mend(self, name: str, seq: int) -> None:
        """Have a sound copy in the shared tier, from one of this node. Raises ``CheckpointError``."""
        copies = list(self._all(name, seq))
        for copy in (one for one in copies if one.tier.shared):
            try:
                copy.tier.store.verify(copy.image)
            except ImageDamaged as error:
                with self.pinned(copy):  # what cannot be read now may be all that there is
                    if not any(one.is_sound() for one in copies if one is not copy):
                        raise
                    self._aside(copy, f"its copy in the tier {copy.tier.name} is damaged: {error}", drop=True)
                    self.publish(name, seq)
                self.report(copy.image.manifest.key, "its shared image was damaged and is mended: it can be woken")
            return
        self.publish(name, seq)

    def pull(
        self, copy: Copy, *, expected_s: float | None, durable: bool = True, without: Collection[str] = ()
    ) -> Copy | None:
        """Bring an image to the fastest tier of this node that takes it; ``None``: none does. Raises ``ImageDamaged``.

        ``expected_s``: it is wanted in so many seconds. ``durable``: also to a tier that is. ``without``: names of
        tiers to which it is not brought.
        """
        faster = self.tiers[: self.tiers.index(copy.tier)]
        takers = [tier for tier in faster if tier.name not in without and (durable or not tier.durable)]
        wanted = not expected_s
        with self._pulls.turn(copy.id, self._ahead, wanted=wanted) as limiter:
            for tier in takers:
                there = next((one for one in self._copies_of(copy.image.manifest) if one.tier is tier), None)
                if there is not None:  # brought while this one waited for its turn
                    return there
                held = self.retention.held(copy, tier, expected_s=expected_s)
                try:
                    if not self.retention.may_take(tier, held.size - held.held):
                        continue
                    with suppress(NoRoom):
                        self.retention.make_room_for(tier, held)
                        return self.move(copy, tier, limiter, stop=lambda: not wanted and self.stopping.is_set())
                except ImageDamaged:
                    raise
                except (CheckpointError, OSError) as error:
                    self.report(copy.image.manifest.key, f"not brought to the tier {tier.name}: {_text(error)}")
        return None


def _age(facts: Manifest) -> tuple[float, str, int]:
    """Lower is older; the same on every node."""
    return facts.dumped_epoch, facts.key.name, facts.seq


def _text(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
