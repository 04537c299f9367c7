"""Digests of files: a hash of the hashes of blocks, of the kind named in the manifest, for many files in parallel."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import blake3
import pytest

from slurm_affinode.checkpoint.image import block_io, digest
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged
from slurm_affinode.checkpoint.store.image_store import DirectoryStore

BLOCK = 1 << 12


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", BLOCK)


def of_file(kind: digest.DigestAlgorithm, fd: int, size: int, executor: ThreadPoolExecutor) -> str:
    """Return the digest of one file."""
    (made,) = digest.of_files(kind, [nullcontext(digest.begin(kind, fd, size, executor))])
    return made


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 17])
def test_digest_is_the_hash_of_the_hashes_of_blocks(tmp_path: Path, size: int) -> None:
    """It is documented, so that other programs can compute it."""
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    parts = [data[at : at + BLOCK] for at in range(0, max(1, size), BLOCK)]
    expected = {
        "sha256-64m": hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest(),
        "blake3-64m": blake3.blake3(b"".join(blake3.blake3(part).digest() for part in parts)).hexdigest(),
    }
    with (tmp_path / "file").open("rb") as file, digest.pool() as executor:
        assert {name: of_file(digest.named(name), file.fileno(), size, executor) for name in expected} == expected


def test_holes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's sparse file may have any size. Who takes the pieces gets zeros."""
    kind, size, data = digest.preferred(), 5 * BLOCK + 17, os.urandom(BLOCK)
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(2 * BLOCK)
        file.write(data)
    expected = [kind.new() for _ in range(6)]
    content = path.read_bytes()
    for number, state in enumerate(expected):
        state.update(memoryview(content[number * BLOCK : (number + 1) * BLOCK]))
    offsets: list[int] = []

    def read(fd: int, buffer: block_io.Buffer, length: int, offset: int) -> int:
        offsets.append(offset)
        return block_io.read_into(fd, buffer, length, offset)

    monkeypatch.setattr(digest, "read_into", read)
    pieces = bytearray()

    def take(offset: int, piece: memoryview) -> None:
        assert offset == len(pieces)
        pieces.extend(piece)

    with path.open("rb") as file:
        for number, state in enumerate(expected):
            assert digest.block(kind, file.fileno(), number, size, take) == state.digest()
        assert (offsets, pieces) == ([2 * BLOCK], content)
        with pytest.raises(EOFError):
            digest.block(kind, file.fileno(), 6, 7 * BLOCK)


def test_many_files_are_digested_in_order(tmp_path: Path) -> None:
    """Progress is counted in bytes, and all files are closed, even if one of them is shorter than its size."""
    kind, opened = digest.preferred(), set()
    sizes = [number * 700 for number in range(2 * digest._FILES_AHEAD)]
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(os.urandom(size))

    with digest.pool() as executor:

        @contextmanager
        def reading(number: int, more: int = 0) -> Iterator[digest.FileDigest]:
            with (tmp_path / str(number)).open("rb") as file:
                opened.add(number)
                yield digest.begin(kind, file.fileno(), sizes[number] + more, executor)
                opened.discard(number)

        read: list[int] = []
        together = list(digest.of_files(kind, map(reading, range(len(sizes))), read.append))
        assert not opened
        assert sum(read) == sum(sizes)
        for number, size in enumerate(sizes):
            with (tmp_path / str(number)).open("rb") as file:
                assert together[number] == of_file(kind, file.fileno(), size, executor)
        with pytest.raises(EOFError):
            list(digest.of_files(kind, (reading(number, number == 20) for number in range(len(sizes)))))
        assert not opened


def test_images_of_either_digest_kind_are_verified(
    store: DirectoryStore, make_image: Callable[..., Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image keeps the kind that it was written with; one flipped bit is detected with both."""
    new = make_image()
    monkeypatch.setattr(digest, "blake3", lambda: None)
    old = make_image()
    monkeypatch.undo()
    monkeypatch.setattr(digest, "BLOCK", BLOCK)
    assert (new.manifest.digest, old.manifest.digest) == ("blake3-64m", "sha256-64m")
    for image in (new, old):
        store.verify(image)
        pages = store.path / image.manifest.key.name / f"{image.manifest.seq:04d}" / "criu" / "pages-1.img"
        data = bytearray(pages.read_bytes())
        data[BLOCK + 3] ^= 0x10
        pages.write_bytes(data)
        with pytest.raises(ImageDamaged, match=r"pages-1\.img: its contents have changed"):
            store.verify(image)


def test_digest_kind_that_is_unavailable_is_reported(
    store: DirectoryStore, make_image: Callable[..., Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is not damaged: the package is missing, or the image is of a later release."""
    image = make_image()
    monkeypatch.setattr(digest, "blake3", lambda: None)
    with pytest.raises(CheckpointError, match="BLAKE3") as result:
        store.verify(image)
    assert not isinstance(result.value, ImageDamaged)
    assert "package blake3" in (result.value.hint or "")
    with pytest.raises(CheckpointError, match="this release knows blake3-64m and sha256-64m"):
        digest.named("md5")
