"""A copy of an image that root alone can change: what was verified is what is restored."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import digest, private_image
from slurm_affinode.checkpoint.criu_images import PAGE, BadImage
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, Pages, RestoreFailed, Take
from slurm_affinode.checkpoint.memorymap import Memory, Run
from slurm_affinode.checkpoint.private_image import PrivateImage
from slurm_affinode.checkpoint.verifying import NamedPages

OUTPUT = b"tre"
LARGE = b"local" * (1 << 20)


class Sound:
    """Pages of an image whose files are as they were written."""

    def __init__(self) -> None:
        self.checked: dict[str, bytes] = {}

    def begin(self, take: Take | None = None) -> None:
        """Nothing is read."""

    def sound(self, timeout_s: float | None = None) -> None:
        """It is."""

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """Whatever it was."""
        self.checked[path.removeprefix("criu/")] = b"".join(blocks)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def source(tmp_path: Path, held: ExitStack) -> tuple[Path, int]:
    """Files of an image."""
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
    """What is verified is what was copied, whatever happens to the store afterwards."""
    pages = Sound()
    image = copy(held, source[1], pages, shared=shared)
    for path in source[0].iterdir():
        if path.name != "local-1" or shared:  # on a store of this node only root could
            path.write_bytes(b"swapped")
    assert image.read("files.img") == b"files" == pages.checked["files.img"]
    assert sorted(image.names()) == ["empty.img", "files.img", "local-2"]
    assert os.pread(image.open("local-2"), 9, 0) == b"small"
    assert os.pread(image.open("local-1"), len(LARGE) + 1, 0) == LARGE
    assert ("local-1" in pages.checked) == shared
    facts = image.path.stat()
    assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (os.geteuid(), 0o700)


def test_nothing_is_left(source: tuple[Path, int]) -> None:
    """In memory, or open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with private_image.private_image(source[1], Sound(), shared=True) as image:
        path = image.path
        image.provide_pages(())
    assert not path.exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("name", ["files.img", "local-1"])
@pytest.mark.parametrize("what", ["link", "fifo"])
def test_only_regular_files_are_copied(source: tuple[Path, int], held: ExitStack, name: str, what: str) -> None:
    """Of a link nothing is read, and nobody waits for a FIFO: such a file is as one that is missing."""
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


def test_changed_file_of_a_store_is_refused(
    make_image: Callable[..., Image], store: DirectoryStore, held: ExitStack
) -> None:
    """By the digest of what was read, after all of it had been found to be sound."""
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
def test_saved_output_that_is_swapped_is_not_used(
    make_image: Callable[..., Image],
    store: DirectoryStore,
    held: ExitStack,
    tmp_path: Path,
    swapped: bytes | str | None,
) -> None:
    """By a writer of the shared store, after the image was verified."""
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
    found = private_image.verified_file(fd, "out.1", "out.1", pages, shared=True)
    held.callback(os.close, found)
    (Path(f"/proc/self/fd/{fd}").readlink() / "out.1").write_bytes(b"swapped")
    assert os.pread(found, 100, 0) == OUTPUT


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["pstree.img", "local-1"])
def test_file_that_grows_without_end_is_refused(
    make_image: Callable[..., Image], store: DirectoryStore, held: ExitStack, name: str
) -> None:
    """It is read up to the size that the manifest lists: a sparse file of 4 TiB takes no time and no space."""
    image = make_image(local=LARGE)
    pages = held.enter_context(store.verifying(image))
    fd = store.open_criu(image)
    held.callback(os.close, fd)
    with open(name, "r+b", opener=lambda path, flags: os.open(path, flags, dir_fd=fd)) as file:
        file.truncate(4 << 40)
    with pytest.raises(ImageDamaged, match=f"{name}: its contents have changed"):
        copy(held, fd, pages, shared=True)


@pytest.mark.parametrize("shared", [False, True])
def test_full_disk_of_the_node_is_no_damage(
    source: tuple[Path, int], held: ExitStack, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The image is not set aside for it."""

    def full(fd: int, data: memoryview, at: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(private_image, "_write_at", full)
    with pytest.raises(CheckpointError, match=r"cannot be copied.*: No space left on device") as raised:
        copy(held, source[1], NamedPages(Sound(), "alpha.7/0001"), shared=shared)
    assert not isinstance(raised.value, ImageDamaged)


def test_file_of_several_blocks_is_verified(
    make_image: Callable[..., Image], store: DirectoryStore, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the digests of the manifest are made."""
    monkeypatch.setattr(digest, "BLOCK", 3)
    image = make_image()
    pages = held.enter_context(store.verifying(image))
    fd = store.open_criu(image)
    held.callback(os.close, fd)
    assert copy(held, fd, pages).read("pstree.img") == b"tree"


def test_pages_of_this_node_are_read_where_they_are(source: tuple[Path, int], held: ExitStack) -> None:
    """By a link that leads there from the private directory, whatever the root of a process is."""
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


def test_pages_of_this_node_are_no_links(source: tuple[Path, int], held: ExitStack) -> None:
    """A link in a store is not one of ours."""
    image = copy(held, source[1], Sound())
    path = source[0] / "pages-1.img"
    path.rename(source[0].parent / "elsewhere")
    path.symlink_to(source[0].parent / "elsewhere")
    with pytest.raises(RestoreFailed, match=r"pages-1.img: is another file"):
        image.provide_pages(())


MEMORY = Memory(7, "pages-1.img", (Run(2 * PAGE, 0, PAGE), Run(4 * PAGE, 0, 2 * PAGE)))


def test_pages_that_criu_reads_from_a_shared_store_are_copied(source: tuple[Path, int], held: ExitStack) -> None:
    """Those that are filled from outside are not: the file has holes there."""
    image = copy(held, source[1], Sound(), shared=True)
    image.provide_pages([MEMORY])
    data = image.read("pages-1.img")
    assert [data[number * PAGE] for number in range(8)] == [0, 1, 0, 3, 0, 0, 6, 7]
    assert len(data) == 8 * PAGE
    image.provide_pages(())
    assert [image.read("pages-1.img")[number * PAGE] for number in range(8)] == list(range(8))


@pytest.mark.parametrize(("page", "seen"), [(1, True), (2, False), (7, True)])
def test_page_that_changes_between_both_readings_is_seen(
    source: tuple[Path, int], held: ExitStack, page: int, seen: bool
) -> None:
    """Where CRIU reads it itself; those that are filled are those that were verified."""
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
        with pytest.raises(ImageDamaged, match="change from one look to the next"):
            image.check_compared()
    else:
        image.check_compared()


def test_without_room_for_pages_nothing_is_restored(
    source: tuple[Path, int], held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said why, and what would help."""
    image = copy(held, source[1], Sound(), shared=True)
    monkeypatch.setattr(private_image, "_room", lambda path: 7 * PAGE)
    with pytest.raises(RestoreFailed, match="there is no room for 32768 bytes"):
        image.provide_pages(())
    image.provide_pages([MEMORY])


def test_what_criu_reads_can_be_replaced(source: tuple[Path, int], held: ExitStack) -> None:
    """The store's files stay."""
    image = copy(held, source[1], Sound())
    image.replace("files.img", b"other")
    image.replace("empty.img", None)
    assert image.read("files.img") == b"other"
    assert "empty.img" not in image.names()
    assert (source[0] / "files.img").read_bytes() == b"files"
