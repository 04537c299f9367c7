"""A copy of an image that only root can change: exactly the verified data is restored."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image import digest, private_image
from slurm_affinode.checkpoint.image.criu_images import PAGE, BadImage
from slurm_affinode.checkpoint.image.memory_map import PageStretch, TreeMemory
from slurm_affinode.checkpoint.image.private_image import PrivateImage
from slurm_affinode.checkpoint.image.verifier import NamedPages
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, Pages, RestoreFailed, Take
from slurm_affinode.checkpoint.store.image_store import DirectoryStore

OUTPUT = b"tre"
LARGE = b"local" * (1 << 20)


class Sound:
    """Pages of an image whose files are unchanged."""

    def __init__(self) -> None:
        self.checked: dict[str, bytes] = {}

    def begin(self, take: Take | None = None) -> None:
        """Read nothing."""

    def sound(self, timeout_s: float | None = None) -> None:
        """Raise nothing."""

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """Record the contents."""
        self.checked[path.removeprefix("criu/")] = b"".join(blocks)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def source(tmp_path: Path, held: ExitStack) -> tuple[Path, int]:
    """Return the files of an image and a descriptor of their directory."""
    path = tmp_path / "criu"
    path.mkdir()
    for name, data in (("files.img", b"files"), ("local-1", LARGE), ("local-2", b"small"), ("empty.img", b"")):
        (path / name).write_bytes(data)
    (path / "pages-1.img").write_bytes(b"".join(bytes([number]) * PAGE for number in range(8)))
    fd = os.open(path, os.O_RDONLY)
    held.callback(os.close, fd)
    return path, fd


def copy(held: ExitStack, fd: int, pages: Pages, *, shared: bool = False) -> PrivateImage:
    return held.enter_context(private_image.private_image(fd, pages, shared=shared))


@pytest.mark.parametrize("shared", [False, True])
def test_small_files_are_read_once(source: tuple[Path, int], held: ExitStack, shared: bool) -> None:
    """The copy is verified, so later changes in the store have no effect."""
    pages = Sound()
    image = copy(held, source[1], pages, shared=shared)
    for path in source[0].iterdir():
        if path.name != "local-1" or shared:  # in a store of this node only root could change it
            path.write_bytes(b"swapped")
    assert image.read("files.img") == b"files" == pages.checked["files.img"]
    assert sorted(image.names()) == ["empty.img", "files.img", "local-2"]
    assert os.pread(image.open("local-2"), 9, 0) == b"small"
    assert os.pread(image.open("local-1"), len(LARGE) + 1, 0) == LARGE
    assert ("local-1" in pages.checked) == shared
    facts = image.path.stat()
    assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (os.geteuid(), 0o700)


def test_private_image_leaves_nothing(source: tuple[Path, int]) -> None:
    """No file in memory and no descriptor is left."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with private_image.private_image(source[1], Sound(), shared=True) as image:
        path = image.path
        image.provide_pages(())
    assert not path.exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("name", ["files.img", "local-1"])
@pytest.mark.parametrize("what", ["link", "fifo"])
def test_only_regular_files_are_copied(source: tuple[Path, int], held: ExitStack, name: str, what: str) -> None:
    """Links are not followed and FIFOs do not block; such a file counts as missing."""
    path = source[0] / name
    data = path.read_bytes()
    path.unlink()
    if what == "link":
        (source[0].parent / "elsewhere").write_bytes(data)
        path.symlink_to(source[0].parent / "elsewhere")
    else:
        os.mkfifo(path)
    image = copy(held, source[1], Sound())
    with pytest.raises(BadImage, match=name):
        image.open(name)


def test_file_changed_after_verification_is_refused(
    make_image: Callable[..., Image], store: DirectoryStore, held: ExitStack
) -> None:
    """The digest of the data that was read decides, even after the whole image was found to be sound."""
    image = make_image()
    pages = held.enter_context(store.verifying(image))
    fd = store.open_criu(image)
    held.callback(os.close, fd)
    copy(held, fd, pages)
    path = Path(os.readlink(f"/proc/self/fd/{fd}")) / "pstree.img"  # noqa: PTH115
    path.write_bytes(b"root")
    with pytest.raises(ImageDamaged, match=r"criu/pstree.img: its contents have changed"):
        copy(held, fd, pages)
    path.write_bytes(b"tree")
    (path.parent / "more.img").touch()
    with pytest.raises(ImageDamaged, match=r"criu/more.img: does not belong there"):
        copy(held, fd, pages)


@pytest.mark.parametrize("swapped", [b"eert", b"ert", b"", "link", "fifo", None])
def test_saved_output_swapped_after_verification_is_refused(
    make_image: Callable[..., Image],
    store: DirectoryStore,
    held: ExitStack,
    tmp_path: Path,
    swapped: bytes | str | None,
) -> None:
    """A writer of the shared store has replaced it."""
    (tmp_path / "elsewhere").write_bytes(OUTPUT)
    image = make_image()
    pages = held.enter_context(store.verifying(image))
    fd = store.open(image)
    held.callback(os.close, fd)
    path = Path(f"/proc/self/fd/{fd}").readlink() / "out.1"
    path.unlink()
    if swapped == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif swapped == "fifo":
        os.mkfifo(path)
    elif isinstance(swapped, bytes):
        path.write_bytes(swapped)
    with pytest.raises(ImageDamaged, match=r"out\.1"):
        private_image.verified_file(fd, "out.1", "out.1", pages, shared=True)


def test_saved_output_is_read_once(
    make_image: Callable[..., Image], store: DirectoryStore, held: ExitStack, tmp_path: Path
) -> None:
    """A change of the file in the store does not reach the descriptor."""
    image = make_image()
    pages = held.enter_context(store.verifying(image))
    fd = store.open(image)
    held.callback(os.close, fd)
    verified_file = private_image.verified_file(fd, "out.1", "out.1", pages, shared=True)
    held.callback(os.close, verified_file)
    (Path(f"/proc/self/fd/{fd}").readlink() / "out.1").write_bytes(b"swapped")
    assert os.pread(verified_file, 100, 0) == OUTPUT


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["pstree.img", "local-1"])
def test_file_that_has_grown_is_refused(
    make_image: Callable[..., Image], store: DirectoryStore, held: ExitStack, name: str
) -> None:
    """It is read up to the size in the manifest: a sparse file of 4 TiB takes neither time nor space."""
    image = make_image(local=LARGE)
    pages = held.enter_context(store.verifying(image))
    fd = store.open_criu(image)
    held.callback(os.close, fd)
    with open(name, "r+b", opener=lambda path, flags: os.open(path, flags, dir_fd=fd)) as file:
        file.truncate(4 << 40)
    with pytest.raises(ImageDamaged, match=f"{name}: its contents have changed"):
        copy(held, fd, pages, shared=True)


@pytest.mark.parametrize("shared", [False, True])
def test_full_disk_is_not_reported_as_damage(
    source: tuple[Path, int], held: ExitStack, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The image is not set aside."""

    def full(fd: int, data: memoryview, at: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(private_image, "_write_at", full)
    with pytest.raises(CheckpointError, match=r"cannot be copied.*: No space left on device") as raised:
        copy(held, source[1], NamedPages(Sound(), "alpha.7/0001"), shared=shared)
    assert not isinstance(raised.value, ImageDamaged)


def test_file_of_several_blocks_is_verified(
    make_image: Callable[..., Image], store: DirectoryStore, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests are the same as those of the manifest."""
    monkeypatch.setattr(digest, "BLOCK", 3)
    image = make_image()
    pages = held.enter_context(store.verifying(image))
    fd = store.open_criu(image)
    held.callback(os.close, fd)
    assert copy(held, fd, pages).read("pstree.img") == b"tree"


def test_pages_on_this_node_are_read_in_place(source: tuple[Path, int], held: ExitStack) -> None:
    """A link in the private directory leads to them, whatever the root directory of a process is."""
    image = copy(held, source[1], Sound())
    image.provide_pages(())
    target = os.readlink("pages-1.img", dir_fd=image.fd)
    assert target.startswith("../")
    assert os.path.samestat(os.stat("pages-1.img", dir_fd=image.fd), (source[0] / "pages-1.img").stat())
    inside = os.fork()
    if inside == 0:
        status = 1
        with suppress(BaseException):
            if os.geteuid() == 0:
                os.chroot(source[0].parent)
            status = os.fstat(os.open("pages-1.img", os.O_RDONLY, dir_fd=image.fd)).st_size // PAGE
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) == 8


def test_link_in_place_of_pages_is_refused(source: tuple[Path, int], held: ExitStack) -> None:
    """A link in a store was not made by the agent."""
    image = copy(held, source[1], Sound())
    path = source[0] / "pages-1.img"
    path.rename(source[0].parent / "elsewhere")
    path.symlink_to(source[0].parent / "elsewhere")
    with pytest.raises(RestoreFailed, match=r"pages-1.img: is another file"):
        image.provide_pages(())


MEMORY = TreeMemory(7, "pages-1.img", (PageStretch(2 * PAGE, 0, PAGE), PageStretch(4 * PAGE, 0, 2 * PAGE)))


def test_pages_that_criu_reads_from_a_shared_store_are_copied(source: tuple[Path, int], held: ExitStack) -> None:
    """Pages that the agent fills are not copied: the file has holes there."""
    image = copy(held, source[1], Sound(), shared=True)
    image.provide_pages([MEMORY])
    data = image.read("pages-1.img")
    assert [data[number * PAGE] for number in range(8)] == [0, 1, 0, 3, 0, 0, 6, 7]
    assert len(data) == 8 * PAGE
    image.provide_pages(())
    assert [image.read("pages-1.img")[number * PAGE] for number in range(8)] == list(range(8))


@pytest.mark.parametrize(("page", "seen"), [(1, True), (2, False), (7, True)])
def test_page_that_changes_between_two_reads_is_detected(
    source: tuple[Path, int], held: ExitStack, page: int, seen: bool
) -> None:
    """Only pages that CRIU reads itself are compared; the agent fills the verified data."""
    image = copy(held, source[1], Sound(), shared=True)
    image.provide_pages([MEMORY])
    taken: list[tuple[str, int]] = []
    take = image.compare(lambda name, at, view: taken.append((name, at)))
    assert take is not None
    verified = bytearray((source[0] / "pages-1.img").read_bytes())
    verified[page * PAGE + 5] ^= 1
    for at in (0, 4 * PAGE):
        take("pages-1.img", at, memoryview(verified)[at : at + 4 * PAGE])
    assert taken == [("pages-1.img", 0), ("pages-1.img", 4 * PAGE)]
    if seen:
        with pytest.raises(ImageDamaged, match="change while it is read"):
            image.check_compared()
    else:
        image.check_compared()


def test_restore_without_room_for_pages_is_refused(
    source: tuple[Path, int], held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says why."""
    image = copy(held, source[1], Sound(), shared=True)
    monkeypatch.setattr(private_image, "_room", lambda path: 7 * PAGE)
    with pytest.raises(RestoreFailed, match="there is no room for 32768 bytes"):
        image.provide_pages(())
    image.provide_pages([MEMORY])


def test_file_for_criu_can_be_replaced(source: tuple[Path, int], held: ExitStack) -> None:
    """The file in the store is unchanged."""
    image = copy(held, source[1], Sound())
    image.replace("files.img", b"other")
    image.replace("empty.img", None)
    assert image.read("files.img") == b"other"
    assert "empty.img" not in image.names()
    assert (source[0] / "files.img").read_bytes() == b"files"
