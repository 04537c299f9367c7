"""``images``: list, verify and prune checkpoint images."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from job_owner import OWNER, hand_over

from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image import digest
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.interface import Image
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.cli.images import images
from slurm_affinode.model.suspension import JobKey, Manifest, SuspendOption, Versions
from slurm_affinode.slurm.interface import UnknownJobError
from slurm_affinode.suspension.records.shared_state import Note, Notes
from slurm_affinode.suspension.records.sweep import Absences

KEY = bytes(64)


@pytest.fixture
def config(tmp_path: Path, open_path: Path) -> Path:
    """A node with one image of job 123 in its local store, and an empty shared store."""
    key = tmp_path / "image.key"
    key.write_bytes(KEY)
    key.chmod(0o400)
    for name in ("local", "shared"):
        (tmp_path / name).mkdir(mode=0o700)
    store = DirectoryStore(tmp_path / "local", KEY)
    (open_path / ".link_remap.1.2").write_text("kept")
    hand_over(open_path)
    aside = {"directory": str(open_path), "name": "link_remap.5", "aside": ".link_remap.1.2"}
    removed = [aside | {"inode": (open_path / ".link_remap.1.2").stat().st_ino}]
    with store.begin(JobKey("alpha", 123, 5), uid=OWNER.uid, estimate=0) as writer:
        criu = Path(f"/proc/self/fd/{writer.criu_fd}")
        (criu / "pages-1.img").write_bytes(b"memory" * 1000)
        (criu / "remaps.json").write_text(json.dumps({"uid": OWNER.uid, "gid": OWNER.gid, "files": removed}))
        writer.commit(
            Manifest(
                key=JobKey("alpha", 123, 5), seq=0, uid=OWNER.uid, gid=OWNER.gid, node="c1", restarts=0,
                started_epoch=1.0,
                dumped_epoch=2.0, option=SuspendOption(), versions=Versions("0", "6", "4.2"), root_pid=2, cuda_pids=(),
                gpus=(), gpu_bytes=3 << 30, outputs=(), files=(),
            )
        )  # fmt: skip
    store.close()
    path = tmp_path / "config.toml"
    path.write_text(
        f'[suspend]\nkey_file = "{key}"\nlocal_store = "{tmp_path}/local"\nshared_store = "{tmp_path}/shared"\n'
    )
    return path


def run(*arguments: object) -> tuple[int, str]:
    """Return the exit status and the output of the command."""
    done = CliRunner().invoke(images, [str(argument) for argument in arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return int(done.return_value or 0), done.output


def test_images_are_listed(config: Path) -> None:
    """The list shows job, size and store, and only the jobs that are named."""
    status, text = run("list", "--config", config)
    assert status == 0
    assert "alpha.123" in text
    assert "3 GiB" in text
    assert "1 images" in text
    record = json.loads(run("list", "--json", "--config", config)[1])
    assert [image["key"]["job_id"] for image in record["images"]] == [123]
    assert len(record["stores"]) == 2
    assert "alpha.123" not in run("list", "124", "--config", config)[1]


def test_damaged_image_is_reported(config: Path) -> None:
    """``list`` checks only the manifest, ``verify`` also the contents."""
    assert run("verify", "--config", config) == (0, f"{config.parent}/local: alpha.123/0001: ok\n")
    pages = config.parent / "local" / "alpha.123" / "0001" / "criu" / "pages-1.img"
    pages.write_bytes(b"Memory" + pages.read_bytes()[6:])
    assert run("list", "--config", config)[0] == 0
    status, text = run("verify", "--quiet", "123", "--config", config)
    assert status == 1
    assert "contents have changed" in text
    (pages.parents[1] / "manifest.json").write_text("{}")
    status, text = run("list", "--config", config)
    assert status == 1
    assert "damaged" in text


def test_image_of_suspended_job_is_pruned_only_with_yes(config: Path) -> None:
    with pytest.raises(InputError, match="exist only in their images"):
        run("prune", "123", "--config", config)
    assert run("prune", "123", "--dry-run", "--config", config)[1].startswith("would remove alpha.123/0001")
    assert run("prune", "123", "--yes", "--config", config)[1].startswith("removed alpha.123/0001")
    assert run("prune", "123", "--yes", "--config", config)[1] == "nothing to remove\n"


def test_number_of_jobs_of_several_clusters_is_refused(config: Path, tmp_path: Path) -> None:
    """Clusters may share a store; an image that is removed is lost."""
    store = DirectoryStore(tmp_path / "local", KEY)
    facts = store.get("alpha.123", 1).manifest
    key = JobKey("beta", 123, 5)
    with store.begin(key, uid=OWNER.uid, estimate=0) as writer:
        writer.commit(replace(facts, key=key, seq=0, files=()))
    store.close()
    with pytest.raises(InputError, match=r"several clusters have images of a job 123: alpha\.123, beta\.123"):
        run("prune", "123", "--yes", "--config", config)
    assert run("prune", "beta.123", "--yes", "--config", config)[0] == 0
    listed = json.loads(run("list", "--json", "--config", config)[1])
    assert [image["key"]["cluster"] for image in listed["images"]] == ["alpha"]
    assert "alpha" not in run("list", "beta.123", "--config", config)[1]


def test_pruned_job_is_marked_in_its_note(config: Path) -> None:
    """Other nodes may have copies; the note of the job prevents their use."""
    notes = Notes(config.parent, Signer(KEY, "c1"))
    for job in (123, 124):
        notes.write(Note("alpha", job, 5, 0, 1, 0, "c1", 0, 0.0, "idle", 1, 0, 0, "auto"))
    run("prune", "123", "--dry-run", "--config", config)
    assert not any(note.given_up for note in notes.all())
    run("prune", "123", "--yes", "--config", config)
    assert [note.given_up for note in notes.all()] == [True, False]


def test_verify_of_job_without_image_fails(config: Path) -> None:
    assert run("verify", "77", "--config", config) == (1, "no images\n")


class Slurm:
    """A slurmctld with an empty job list; ``known`` is the state of every job that is queried by ID."""

    def __init__(self, known: str | None = None) -> None:
        self._known = known

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def config(self) -> dict[str, str]:
        return {"ClusterName": "alpha"}

    def jobs(self) -> tuple[()]:
        return ()

    def job(self, job: int) -> SimpleNamespace:
        if self._known is None:
            raise UnknownJobError(f"show job {job}: invalid job id")
        submit = datetime.fromtimestamp(5, UTC)
        return SimpleNamespace(
            job_id=job,
            uid=OWNER.uid,
            submit=submit,
            restarts=1,
            state=self._known,
            has_ended=self._known == "CANCELLED",
        )


def test_image_of_job_missing_from_job_list_is_kept(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is kept while Slurm still knows the job by its ID."""
    arguments = ("--young", "0s", "--config", config)
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm("PENDING"))
    with pytest.raises(UnreachableError, match="lacks 123"):
        run("prune", *arguments)
    assert "1 images" in run("list", "--config", config)[1]
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm("CANCELLED"))
    assert run("prune", *arguments)[1].startswith("removed alpha.123/0001")


@pytest.mark.parametrize("how", [("123", "--yes"), ("--unknown", "--yes", "--young", "0s")])
def test_file_set_aside_for_image_is_removed_with_it(
    config: Path, open_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    """It is the last name of a deleted file that the job has open; only the image refers to it."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm())
    run("prune", *how, "--config", config)
    assert not (open_path / ".link_remap.1.2").exists()


def test_changed_list_of_files_removes_nothing(config: Path, tmp_path: Path, open_path: Path) -> None:
    """A writer of the store could otherwise have any file of the user removed."""
    index = tmp_path / "local" / "alpha.123" / "0001" / "criu" / "remaps.json"
    (open_path / ".link_remap.8.9").write_text("of another job of the user")
    hand_over(open_path)
    value = json.loads(index.read_text())
    value["files"][0] |= {"aside": ".link_remap.8.9", "inode": (open_path / ".link_remap.8.9").stat().st_ino}
    index.write_text(json.dumps(value))
    run("prune", "123", "--yes", "--config", config)
    assert (open_path / ".link_remap.8.9").exists()


def test_images_of_ended_jobs_are_pruned(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--dry-run`` lists the images without removing them."""

    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm("CANCELLED"))
    assert run("prune", "--config", config) == (0, "nothing to remove\n")
    arguments = ("--young", "0s", "--config", config)
    would = f"would remove alpha.123/0001 from {config.parent}/local\n"
    assert run("prune", "--dry-run", *arguments) == (0, would)
    assert run("prune", *arguments) == (0, would.replace("would remove", "removed"))
    assert run("list", "--config", config)[1].count("0 images") == 2


def test_image_written_after_job_query_is_kept(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the stores may take longer than submitting and suspending a job."""

    def it_comes(*_: object) -> dict[str, object]:
        time.sleep(0.5)
        os.utime(config.parent / "local" / "alpha.123" / "0001")
        time.sleep(0.1)
        return {}

    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm("CANCELLED"))
    monkeypatch.setattr(Absences, "update", it_comes)
    assert run("prune", "--young", "0s", "--config", config) == (0, "nothing to remove\n")


def more_images(config: Path, count: int) -> None:
    """Write images of ``count`` more jobs to the shared store."""
    shared = DirectoryStore(config.parent / "shared", KEY)
    local = DirectoryStore(config.parent / "local", KEY)
    facts = local.get("alpha.123", 1).manifest
    local.close()
    for number in range(200, 200 + count):
        key = JobKey("alpha", number, 5)
        with shared.begin(key, uid=OWNER.uid, estimate=0) as writer:
            writer.commit(replace(facts, key=key, seq=0, files=()))
    shared.close()


def test_image_of_unknown_job_is_kept(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld may have lost its state; only an administrator may remove the image early."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm())
    status, text = run("prune", "--young", "0s", "--config", config)
    assert status == 0
    assert "kept: alpha.123: Slurm does not know this job" in text
    assert "Slurm has not known this job" in run("list", "--config", config)[1]
    with pytest.raises(InputError, match="exist only in their images"):
        run("prune", "--unknown", "--config", config)
    would = run("prune", "--unknown", "--dry-run", "--young", "0s", "--config", config)[1]
    assert would == f"would remove alpha.123/0001 from {config.parent}/local\n"
    done = run("prune", "--unknown", "--yes", "--young", "0s", "--config", config)[1]
    assert done == would.replace("would remove", "removed")


def test_sweep_that_would_remove_most_images_waits_for_an_administrator(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes nothing, and ``list`` and ``prune`` report it until it is confirmed."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm())
    config.write_text(config.read_text() + 'keep_unknown = "0.001s"\n')
    more_images(config, 6)
    run("prune", "--young", "0s", "--config", config)  # records that Slurm does not know the jobs
    for _ in range(2):
        status, text = run("prune", "--young", "0s", "--config", config)
        assert status == 1
        assert "Slurm does not know the jobs of 6 of 6 images" in text
        assert "images prune --unknown --yes" in text
        status, text = run("list", "--config", config)
        assert status == 1
        assert "the sweep of images is stopped" in text
        assert json.loads(run("list", "--json", "--config", config)[1])["stopped"] is not None
    assert len(list((config.parent / "shared").iterdir())) == 6
    status, text = run("prune", "--unknown", "--yes", "--young", "0s", "--config", config)
    assert (status, text.count("removed ")) == (0, 7)
    assert run("list", "--config", config)[0] == 0
    assert not list((config.parent / "shared").iterdir())


def test_few_images_of_unknown_jobs_are_removed_after_keep_unknown(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small number needs no confirmation."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _, **__: Slurm())
    config.write_text(config.read_text() + 'keep_unknown = "0.001s"\n')
    more_images(config, 5)
    run("prune", "--young", "0s", "--config", config)
    status, text = run("prune", "--young", "0s", "--config", config)
    assert (status, text.count("removed ")) == (0, 6)


def test_unsigned_note_is_reported(config: Path) -> None:
    """A note written without the key is ignored and listed."""
    (config.parent / "asleep").mkdir()
    note = {"cluster": "alpha", "job_id": 5, "submit": 1, "restarts": 0, "seq": 1, "uid": 0, "node": "c1"}
    (config.parent / "asleep" / "alpha.5.json").write_text(json.dumps(note))
    status, text = run("list", "--config", config)
    assert status == 1
    assert f"ignored: {config.parent}/asleep/alpha.5.json: " in text


def test_tiers_and_their_problems_are_listed(config: Path) -> None:
    """The list shows complete and partial copies, images that were set aside, and missing tiers."""
    local, shared = (DirectoryStore(config.parent / name, KEY) for name in ("local", "shared"))
    image = local.get("alpha.123", 1)
    local.copy(image, shared)
    assert "disk, shared" in run("list", "--config", config)[1]
    local.cut(image, 10)
    shared.set_aside(image)
    local.close()
    shared.close()
    (config.parent / "memory").mkdir(mode=0o700)
    config.write_text(config.read_text() + f'[suspend.tiers]\nmemory = "{config.parent}/memory"\n')
    status, text = run("list", "123", "--config", config)
    assert status == 1
    assert re.search(r"disk \d+%", text)
    assert "alpha.123/0001." in text
    assert "set aside" in text
    record = json.loads(run("list", "--json", "--config", config)[1])
    assert [(figure["tier"], figure["key"]["job_id"]) for figure in record["partial"]] == [("disk", 123)]
    assert record["images"] == []
    assert record["missing"] == [] or "not on a tmpfs" in record["missing"][0]
    assert run("list", "5", "--config", config)[0] == 0


def test_unread_tier_is_reported(config: Path) -> None:
    (config.parent / "shared").rmdir()
    status, text = run("verify", "--quiet", "--config", config)
    assert status == 0
    assert f"not used: {config.parent}/shared: does not exist" in text
    record = json.loads(run("verify", "--json", "--config", config)[1])
    assert record["missing"] == [f"{config.parent}/shared: does not exist"]
    assert "not used: " in run("prune", "123", "--dry-run", "--config", config)[1]


def test_missing_blake3_package_is_reported_with_hint(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "blake3", lambda: None)
    status, text = run("verify", "--quiet", "--config", config)
    assert status == 1
    assert text.endswith("alpha.123/0001: its digests are BLAKE3 (install the Python package blake3 on this node)\n")


def test_image_removed_during_verification_is_not_damaged(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent removes the image of a job that ends."""
    verify = DirectoryStore.verify

    def verified(store: DirectoryStore, image: Image, **settings: Any) -> None:
        store.remove(image)
        verify(store, image, **settings)

    monkeypatch.setattr(DirectoryStore, "verify", verified)
    assert run("verify", "--quiet", "--config", config) == (0, "no images\n")


def test_read_only_store_does_not_prevent_pruning_others(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other images of the job, complete or partial, are removed; the error is reported with exit status 1."""
    local, shared = (DirectoryStore(config.parent / name, KEY) for name in ("local", "shared"))
    local.copy(local.get("alpha.123", 1), shared)
    shared.cut(shared.get("alpha.123", 1), 10)
    local.close()
    shared.close()
    notes = Notes(config.parent, Signer(KEY, "c1"))
    notes.write(Note("alpha", 123, 5, 0, 1, 0, "c1", 0, 0.0, "idle", 1, 0, 0, "auto"))
    rename = os.rename

    def read_only(name: str, to: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if "local" in Path(f"/proc/self/fd/{src_dir_fd}").readlink().parts:
            raise OSError(errno.EROFS, "Read-only file system")
        rename(name, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", read_only)
        status, text = run("prune", "123", "--yes", "--config", config)
    assert status == 1
    assert f"removed alpha.123/0001 from {config.parent}/shared\n" in text
    assert f"not removed: {config.parent}/local: Read-only file system\n" in text
    assert not list((config.parent / "shared").iterdir())
    assert [note.given_up for note in notes.all()] == [True]


def test_copy_in_progress_is_listed(config: Path) -> None:
    """It is listed as partial."""
    local, shared = (DirectoryStore(config.parent / name, KEY) for name in ("local", "shared"))
    image = local.get("alpha.123", 1)
    shared.copy(local.copy(image, shared), local)
    shared.cut(image, 10)
    with shared.take_up(image):
        assert "disk, shared " in run("list", "--config", config)[1]
        record = json.loads(run("list", "--json", "--config", config)[1])
        assert [item["tier"] for item in record["partial"]] == ["shared"]
    local.close()
    shared.close()


def test_missing_key_is_reported_with_hint(config: Path) -> None:
    """On a login node, the hint is to run the command on a node with the agent, not to create a key."""
    (config.parent / "image.key").unlink()
    with pytest.raises(AffinodeError, match="has no key of images") as caught:
        run("list", "--config", config)
    assert "on a node with the agent" in (caught.value.hint or "")


def test_unreadable_store_does_not_hide_the_others(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported with the reason and exit status 1."""
    size_of, names = root_directory.size_of, root_directory.names
    shared = (config.parent / "shared").stat().st_ino

    def failing(call: Callable[[int], Any]) -> Callable[[int], Any]:
        def image_at(at: int) -> Any:
            if os.fstat(at).st_ino == shared:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return call(at)

        return image_at

    monkeypatch.setattr(root_directory, "size_of", failing(size_of))
    monkeypatch.setattr(root_directory, "names", failing(names))
    status, text = run("list", "--config", config)
    assert status == 1
    assert "alpha.123" in text
    assert "shared: cannot be read: Stale file handle" in text
