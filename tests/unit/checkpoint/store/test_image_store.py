"""The image store: complete images only, verified, of one job and user, within limits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.checkpoint.image import digest, manifest
from slurm_affinode.checkpoint.image import writer as image_writer
from slurm_affinode.checkpoint.image.block_io import Limiter
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, NoRoom
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.transfer import CopyMode
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest

from ..conftest import JOB, KEY, LATER, MANIFEST

Make = Callable[..., Image]


def directory(store: DirectoryStore, image: Image) -> Path:
    """Return the directory of an image."""
    return store.path / image.manifest.key.name / f"{image.manifest.seq:04d}"


def test_writer_in_another_process_is_detected(store: DirectoryStore) -> None:
    """CRIU inherits the lock: the image is being written as long as CRIU lives."""
    writer = store.begin(JOB, uid=1, estimate=0)
    inherited = os.dup(writer.criu_fd)
    writer.leave()
    assert store.busy(JOB)
    with pytest.raises(CheckpointError, match="is being written"):
        store.discard(JOB, 1)
    assert store.sweep([], cluster="cluster", young_s=-1) == []
    os.close(inherited)
    assert not store.busy(JOB)
    store.discard(JOB, 1)
    assert list(store.path.iterdir()) == []


def test_images_are_numbered_and_the_newest_is_found(store: DirectoryStore, make_image: Make) -> None:
    """Numbering also continues after images in another store."""
    first, second = make_image(), make_image()
    assert (first.manifest.seq, second.manifest.seq) == (1, 2)
    assert store.find(LATER) == second
    with store.begin(JOB, uid=1, estimate=0, at_least=7) as writer:
        assert writer.seq == 7


def test_image_number_above_9999(store: DirectoryStore, make_image: Make, tmp_path: Path) -> None:
    """The image is found, newer than the one before, copied, and swept like any other."""
    shared = DirectoryStore(tmp_path / "shared", KEY)
    for seq in (9999, 10_000):
        with store.begin(JOB, uid=1001, estimate=0, at_least=seq) as writer:
            image = writer.commit(MANIFEST)
        assert image.manifest.seq == seq
        store.copy(image, shared)
    findings = shared.find(LATER)
    assert findings is not None
    assert findings.manifest.seq == 10_000
    shared.verify(findings)
    shared.cut(findings, 10)
    assert [facts.seq for facts, _ in shared.begun()] == [10_000]
    assert store.sweep([LATER], cluster="cluster", newest={JOB.name: 10_000}, young_s=-1) == [f"{JOB.name}/9999"]
    assert store.sweep([], cluster="cluster", young_s=-1) == [f"{JOB.name}/10000"]
    shared.close()


@pytest.mark.parametrize(
    "run",
    [
        replace(LATER, uid=1002),
        replace(LATER, restarts=0),
        replace(LATER, key=replace(LATER.key, submit_epoch=JOB.submit_epoch - 1)),
        replace(LATER, key=replace(LATER.key, cluster="other")),
        replace(LATER, key=replace(LATER.key, job_id=124)),
    ],
)
def test_image_is_found_for_its_own_job_only(store: DirectoryStore, make_image: Make, run: LiveRun) -> None:
    """Not for another user, cluster or job ID, a job that was not requeued, or one submitted earlier."""
    make_image()
    assert store.find(run) is None


def tamper(what: str, path: Path, other: Path) -> None:
    """Change an image as root on the file server could."""
    pages, listed = path / "criu" / "pages-1.img", path / "manifest.json"
    match what:
        case "bit":
            data = bytearray(pages.read_bytes())
            data[1234] ^= 4
            pages.write_bytes(data)
        case "output":
            (path / "out.1").write_bytes(b"TRE")
        case "shorter":
            os.truncate(pages, 4999)
        case "longer":
            with pages.open("ab") as file:
                file.write(b"x")
        case "missing":
            pages.unlink()
        case "extra":
            (path / "criu" / "core-9.img").touch(mode=0o600)
        case "extra-top":
            (path / "readme").touch(mode=0o600)
        case "symlink":
            pages.rename(path.parent / "elsewhere")
            pages.symlink_to(path.parent / "elsewhere")
        case "directory-symlink":
            (path / "criu").rename(path.parent / "elsewhere")
            (path / "criu").symlink_to(path.parent / "elsewhere")
        case "image-symlink":
            path.rename(path.parent / "elsewhere")
            path.symlink_to(path.parent / "elsewhere")
        case "job-symlink":
            path.parent.rename(path.parents[1] / "elsewhere")
            path.parent.symlink_to(path.parents[1] / "elsewhere")
        case "hard-link":
            os.link(pages, path.parents[2] / "second-name")
        case "fifo":
            pages.unlink()
            os.mkfifo(pages, 0o600)
        case "mode":
            pages.chmod(0o640)
        case "directory-mode":
            path.chmod(0o755)
        case "uid":
            listed.write_text(listed.read_text().replace('"uid": 1001', '"uid": 1002'))
        case "signature":
            (path / "manifest.hmac").write_text("0" * 64 + "\n")
        case "no-signature":
            (path / "manifest.hmac").unlink()
        case "other-image":
            path.rename(path.with_suffix(".was"))
            other.rename(path)
        case "owner":
            os.chown(pages, 65534, 65534)
        case "directory-owner":
            os.chown(path, 65534, 65534)


TAMPERINGS = (
    *("bit", "output", "shorter", "longer", "missing", "extra", "extra-top", "mode", "directory-mode", "fifo"),
    *("symlink", "directory-symlink", "image-symlink", "job-symlink", "hard-link", "owner", "directory-owner"),
    *("uid", "signature", "no-signature", "other-image"),
)


@pytest.mark.parametrize("what", TAMPERINGS)
def test_changed_image_is_refused(store: DirectoryStore, make_image: Make, what: str) -> None:
    """The error is one line that names the image."""
    if "owner" in what and os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    other = make_image(manifest=replace(MANIFEST, key=JobKey("cluster", 124, 5)))
    image = make_image()
    tamper(what, directory(store, image), directory(store, other))
    with pytest.raises(ImageDamaged) as caught:
        store.verify(store.find(LATER) or image)
    assert "\n" not in str(caught.value)
    assert "cluster.123" in str(caught.value)


def test_small_file_is_verified_before_use(store: DirectoryStore, make_image: Make) -> None:
    """A writer of the store could have root read another list of files to be removed."""
    image = make_image()
    assert store.small_file(image, "pstree.img", 4) == b"tree"
    assert store.small_file(image, "empty.img", 0) == b""
    with pytest.raises(ImageDamaged, match="larger than 3 bytes"):
        store.small_file(image, "pstree.img", 3)
    (directory(store, image) / "criu" / "pstree.img").write_bytes(b"Tree")
    with pytest.raises(ImageDamaged, match=r"criu/pstree\.img: its contents have changed"):
        store.small_file(image, "pstree.img", 4)
    extra = directory(store, image) / "criu" / "remaps.json"
    extra.touch(mode=0o600)
    with pytest.raises(ImageDamaged, match="does not belong there"):
        store.small_file(image, "remaps.json", 4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["manifest.json", "manifest.hmac", "out.1", "criu/pages-1.img", "criu/pstree.img"]),
    place=st.integers(0, 1 << 20),
    bit=st.integers(0, 7),
)
def test_every_changed_bit_is_detected(
    store: DirectoryStore, make_image: Make, name: str, place: int, bit: int
) -> None:
    """Any bit of any file is covered, except for white space around the signature."""
    image = make_image(size=400)
    path = directory(store, image) / name
    contents = bytearray(path.read_bytes())
    before = bytes(contents)
    contents[place % len(contents)] ^= 1 << bit
    path.write_bytes(contents)
    if name == "manifest.hmac" and contents.strip() == before.strip():
        store.verify(image)
    else:
        with pytest.raises(ImageDamaged):
            store.verify(store.find(LATER) or image)
    store.remove(image)


def test_image_of_another_key_is_refused(store: DirectoryStore, make_image: Make) -> None:
    make_image()
    stranger = DirectoryStore(store.path, bytes(32))
    with pytest.raises(ImageDamaged, match="another key"):
        stranger.find(LATER)
    stranger.close()


def test_store_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """Nor is a symbolic link, or anything but a directory, used as a store."""
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    (tmp_path / "file").touch()
    for name in ("open", "link", "file", "none"):
        with pytest.raises(CheckpointError, match=name):
            DirectoryStore(tmp_path / name, KEY, create=False)
    with pytest.raises(CheckpointError, match="it is a symbolic link"):
        DirectoryStore(tmp_path / "link", KEY)


def test_exceeded_limits_are_reported_with_numbers(tmp_path: Path, make_image: Make) -> None:
    """Limits of the store, of the user and of the disk; space reserved by writers counts."""
    store = DirectoryStore(tmp_path / "limited", KEY, quota=20_000, user_quota=12_000)
    make_image(into=store)
    with pytest.raises(NoRoom, match="user 1001"):
        store.begin(JOB, uid=1001, estimate=8_000)
    with store.begin(JOB, uid=1002, estimate=11_000), pytest.raises(NoRoom, match="the store has"):
        store.begin(JOB, uid=1003, estimate=8_000)
    with pytest.raises(NoRoom, match=r"GiB free, 1 PiB needed"):
        store.check_room(1, 1 << 50)
    usage = store.usage()
    assert usage.by_user == {1001: 5007}
    assert usage.images == 1
    store.close()


def test_user_share_is_a_share_of_the_quota(tmp_path: Path, make_image: Make) -> None:
    """One user cannot fill the store; others keep room for their images."""
    store = DirectoryStore(tmp_path / "limited", KEY, quota=20_000, user_share=0.5)
    make_image(into=store)
    store.check_room(1001, 4_900)
    with pytest.raises(NoRoom, match="user 1001 has"):
        store.check_room(1001, 5_000)
    store.check_room(1002, 9_900)
    with pytest.raises(NoRoom, match="user 1002 has 0 B"):
        store.check_room(1002, 10_100)
    store.close()


def test_user_share_without_a_quota_is_a_share_of_the_file_system(tmp_path: Path) -> None:
    """Only the space available for images counts, not other data on the file system."""
    store = DirectoryStore(tmp_path / "unlimited", KEY, user_share=0.5)
    usage = store.usage()
    store.check_room(1001, int(0.4 * usage.free))
    with pytest.raises(NoRoom, match="user 1001 has"):
        store.check_room(1001, int(0.6 * usage.free))
    store.close()


def test_usage_does_not_read_unchanged_manifests_again(
    store: DirectoryStore, make_image: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each manifest lists hundreds of files. Changed and removed images are no longer counted."""
    images = [make_image(manifest=replace(MANIFEST, key=JobKey("cluster", job, 5))) for job in (201, 202, 203)]
    read: list[int] = []
    decode = manifest.decode

    def counted(*args: bytes) -> Manifest:
        read.append(len(args[0]))
        return decode(*args)

    monkeypatch.setattr(manifest, "decode", counted)
    before = store.usage()
    assert (before.images, before.by_user) == (3, {1001: 3 * 5007})
    read.clear()
    assert replace(store.usage(), free=before.free) == before
    assert read == []
    tamper("uid", directory(store, images[0]), Path())
    store.remove(images[1])
    assert store.usage().by_user == {1001: 5007}
    assert len(read) == 1


def test_query_for_writers_does_not_block_a_writer(store: DirectoryStore, make_image: Make) -> None:
    """``images list`` and the sweeps of other nodes query at any moment."""
    image, other = make_image(), DirectoryStore(store.path.parent / "other", KEY)
    other.take_up(image).leave()
    asking = os.open(other.path / JOB.name / "0001.tmp" / "criu", os.O_RDONLY)
    assert image_writer.lock(asking)
    done = threading.Timer(0.2, os.close, (asking,))
    done.start()
    other.take_up(image).leave()
    done.join()
    with other.take_up(image):
        other.budget.settle((JOB.name, 1))
        with pytest.raises(CheckpointError, match="another process is writing"):
            other.take_up(image)
    other.close()


def test_hole_that_is_larger_than_the_store_is_refused(store: DirectoryStore, tmp_path: Path) -> None:
    """A job can make its output file that large at once; filling it with zeros would take hours."""
    with (tmp_path / "out").open("w+b") as hole, store.begin(JOB, uid=1001, estimate=1) as writer:
        hole.truncate(8 << 40)
        with pytest.raises(NoRoom, match=r"out\.1 has 8796093022208 bytes, more than there is room for"):
            writer.save("out.1", hole.fileno(), 8 << 40)
        hole.truncate(3)
        assert writer.save("out.1", hole.fileno(), 3) == 3


@pytest.mark.parametrize("wrong", ["bit", "names", "link", "fifo"])
def test_interrupted_copy_is_continued(
    store: DirectoryStore, tmp_path: Path, make_image: Make, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The copy continues where it ended; wrong data is written again, and stray files are removed."""
    monkeypatch.setattr(digest, "BLOCK", 1 << 12)
    monkeypatch.setattr(digest, "workers", lambda: 1)
    image, shared = make_image(size=1 << 18), DirectoryStore(tmp_path / "shared", KEY)
    seen: list[int] = []

    def stop(count: int) -> None:
        seen.append(count)
        if len(seen) > 40:
            raise OSError(28, "No space left on device")

    with pytest.raises(NoRoom, match="No space left"):
        store.copy(image, shared, CopyMode(Limiter(0), progress=stop))
    assert shared.find(LATER) is None
    half = shared.path / JOB.name / "0001.tmp" / "criu" / "pages-1.img"
    begun = half.stat().st_size
    assert begun > 0
    if wrong == "bit":
        data = bytearray(half.read_bytes())
        data[10] ^= 1
        half.write_bytes(data)
    else:
        half.rename(tmp_path / "half")
        {"names": half.hardlink_to, "link": half.symlink_to, "fifo": lambda _: os.mkfifo(half, 0o600)}[wrong](
            tmp_path / "half"
        )
    (half.parent / "stray.img").touch()
    shared.verify(store.copy(image, shared))
    shared.close()


def test_files_are_digested_while_they_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is the same as of the complete file."""
    monkeypatch.setattr(digest, "BLOCK", 1 << 12)
    fd = os.open(tmp_path, os.O_RDONLY)
    kind = digest.preferred()
    follower = digest.Follower(fd, kind)
    deadline = time.monotonic() + 30
    with (tmp_path / "pages-1.img").open("wb", buffering=0) as file:
        for number in range(40):
            file.write(bytes([number]) * 1000)
        while len(follower._blocks.get("pages-1.img", [])) < 9:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        file.write(b"the end")
    with (tmp_path / "pages-1.img").open("rb") as file, digest.pool() as executor:
        size = 40_007
        (followed,) = digest.of_files(kind, [nullcontext(follower.finish("pages-1.img", file.fileno(), size))])
        (afterwards,) = digest.of_files(kind, [nullcontext(digest.begin(kind, file.fileno(), size, executor))])
        assert followed == afterwards
    follower.stop()
    os.close(fd)
