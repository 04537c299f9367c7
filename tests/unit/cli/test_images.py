"""The command ``images``: what is in the stores, whether it is sound, and what goes."""

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

from slurm_affinode.agent.absences import Absences
from slurm_affinode.agent.notes import Note, Notes
from slurm_affinode.checkpoint import digest, rootdir
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import Image
from slurm_affinode.checkpoint.nodekeys import Signer
from slurm_affinode.cli.images import images
from slurm_affinode.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.model.suspension import JobKey, Manifest, SuspendOption, Versions
from slurm_affinode.slurm.faults import UnknownJobError

KEY = bytes(64)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A node with a store of its own, in which is one image of job 123, and a shared one without any."""
    key = tmp_path / "image.key"
    key.write_bytes(KEY)
    key.chmod(0o400)
    for name in ("local", "shared"):
        (tmp_path / name).mkdir(mode=0o700)
    store = DirectoryStore(tmp_path / "local", KEY)
    with store.begin(JobKey("alpha", 123, 5), uid=os.getuid(), estimate=0) as writer:
        Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").write_bytes(b"memory" * 1000)
        writer.commit(
            Manifest(
                key=JobKey("alpha", 123, 5), seq=0, uid=os.getuid(), gid=0, node="c1", restarts=0, started_epoch=1.0,
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
    """The command's exit status and what it says."""
    done = CliRunner().invoke(images, [str(one) for one in arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return int(done.return_value or 0), done.output


def test_images_are_listed(config: Path) -> None:
    """With their job, size and store; those of other jobs are left out when jobs are named."""
    status, text = run("list", "--config", config)
    assert status == 0
    assert "alpha.123" in text
    assert "3 GiB" in text
    assert "1 images" in text
    found = json.loads(run("list", "--json", "--config", config)[1])
    assert [image["key"]["job_id"] for image in found["images"]] == [123]
    assert len(found["stores"]) == 2
    assert "alpha.123" not in run("list", "124", "--config", config)[1]


def test_a_damaged_image_is_told(config: Path) -> None:
    """In the list only what the manifest shows, in the verification all."""
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


def test_a_sleeping_job_is_given_up_only_when_asked_twice(config: Path) -> None:
    """Its image is all that is left of it."""
    with pytest.raises(InputError, match="all that is left"):
        run("prune", "123", "--config", config)
    assert run("prune", "123", "--dry-run", "--config", config)[1].startswith("would remove alpha.123/0001")
    assert run("prune", "123", "--yes", "--config", config)[1].startswith("removed alpha.123/0001")
    assert run("prune", "123", "--yes", "--config", config)[1] == "nothing to remove\n"


def test_the_agents_are_told_of_a_job_that_is_given_up(config: Path) -> None:
    """Other nodes may have copies: the job's note says that they are not to be used."""
    notes = Notes(config.parent, Signer(KEY, "c1"))
    for job in (123, 124):
        notes.write(Note("alpha", job, 5, 0, 1, 0, "c1", 0, 0.0, "idle", 1, 0, 0, "auto"))
    run("prune", "123", "--dry-run", "--config", config)
    assert not any(note.given_up for note in notes.all())
    run("prune", "123", "--yes", "--config", config)
    assert [note.given_up for note in notes.all()] == [True, False]


def test_a_job_without_image_is_no_success(config: Path) -> None:
    """Who asks for a job's image wants to know that there is one."""
    assert run("verify", "77", "--config", config) == (1, "no images\n")


class Slurm:
    """A controller that lists no jobs; ``known``: what it says of each of them by its id."""

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
            job_id=job, uid=os.getuid(), submit=submit, restarts=1, state=self._known, ended=self._known == "CANCELLED"
        )


def test_the_image_of_a_job_that_a_list_of_slurms_lacks_stays(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all that is left of the job, which Slurm knows when it is asked for it."""
    arguments = ("--young", "0s", "--config", config)
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm("PENDING"))
    with pytest.raises(UnreachableError, match="lacks 123"):
        run("prune", *arguments)
    assert "1 images" in run("list", "--config", config)[1]
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm("CANCELLED"))
    assert run("prune", *arguments)[1].startswith("removed alpha.123/0001")


@pytest.mark.parametrize("how", [("123", "--yes"), ("--unknown", "--yes", "--young", "0s")])
def test_what_was_set_aside_for_an_image_goes_with_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    """The name of a file that the job has open while its own is gone; nothing else knows of it."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm())
    (tmp_path / ".link_remap.1.2").write_text("kept")
    aside = {"directory": str(tmp_path), "name": "link_remap.5", "aside": ".link_remap.1.2"}
    files = [aside | {"inode": (tmp_path / ".link_remap.1.2").stat().st_ino}]
    index = tmp_path / "local" / "alpha.123" / "0001" / "criu" / "remaps.json"
    index.write_text(json.dumps({"uid": os.getuid(), "gid": os.getgid(), "files": files}))
    index.chmod(0o600)
    run("prune", *how, "--config", config)
    assert not (tmp_path / ".link_remap.1.2").exists()


def test_images_of_jobs_that_are_over_are_pruned(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Slurm has said which jobs there are; first one looks what would go."""

    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm("CANCELLED"))
    assert run("prune", "--config", config) == (0, "nothing to remove\n")
    arguments = ("--young", "0s", "--config", config)
    would = f"would remove alpha.123/0001 from {config.parent}/local\n"
    assert run("prune", "--dry-run", *arguments) == (0, would)
    assert run("prune", *arguments) == (0, would.replace("would remove", "removed"))
    assert run("list", "--config", config)[1].count("0 images") == 2


def test_an_image_that_came_since_slurm_was_asked_stays(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the stores may take longer than to submit a job and have it suspended."""

    def it_comes(*_: object) -> dict[str, object]:
        time.sleep(0.5)
        os.utime(config.parent / "local" / "alpha.123" / "0001")
        time.sleep(0.1)
        return {}

    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm("CANCELLED"))
    monkeypatch.setattr(Absences, "update", it_comes)
    assert run("prune", "--young", "0s", "--config", config) == (0, "nothing to remove\n")


def more_images(config: Path, count: int) -> None:
    """Images of further jobs in the shared store."""
    shared = DirectoryStore(config.parent / "shared", KEY)
    local = DirectoryStore(config.parent / "local", KEY)
    facts = local.get("alpha.123", 1).manifest
    local.close()
    for number in range(200, 200 + count):
        key = JobKey("alpha", number, 5)
        with shared.begin(key, uid=os.getuid(), estimate=0) as writer:
            writer.commit(replace(facts, key=key, seq=0, files=()))
    shared.close()


def test_image_of_unknown_job_is_kept(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld may have lost its state; only an administrator removes it before its time."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm())
    status, text = run("prune", "--young", "0s", "--config", config)
    assert status == 0
    assert "kept: alpha.123: Slurm does not know this job" in text
    assert "Slurm has not known this job" in run("list", "--config", config)[1]
    with pytest.raises(InputError, match="all that is left"):
        run("prune", "--unknown", "--config", config)
    would = run("prune", "--unknown", "--dry-run", "--young", "0s", "--config", config)[1]
    assert would == f"would remove alpha.123/0001 from {config.parent}/local\n"
    done = run("prune", "--unknown", "--yes", "--young", "0s", "--config", config)[1]
    assert done == would.replace("would remove", "removed")


def test_sweep_that_would_remove_most_images_waits_for_an_administrator(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes nothing, and every command that looks at the stores says so until it is confirmed."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm())
    config.write_text(config.read_text() + 'keep_unknown = "0.001s"\n')
    more_images(config, 6)
    run("prune", "--young", "0s", "--config", config)  # sees for the first time that Slurm does not know them
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


def test_few_images_of_unknown_jobs_go_after_their_time(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to confirm a handful."""
    monkeypatch.setattr("slurm_affinode.cli.images.open_client", lambda _: Slurm())
    config.write_text(config.read_text() + 'keep_unknown = "0.001s"\n')
    more_images(config, 5)
    run("prune", "--young", "0s", "--config", config)
    status, text = run("prune", "--young", "0s", "--config", config)
    assert (status, text.count("removed ")) == (0, 6)


def test_note_that_no_node_has_signed_is_listed(config: Path) -> None:
    """Whoever can write beside the shared store without the key is noticed."""
    (config.parent / "asleep").mkdir()
    note = {"cluster": "alpha", "job_id": 5, "submit": 1, "restarts": 0, "seq": 1, "uid": 0, "node": "c1"}
    (config.parent / "asleep" / "alpha.5.json").write_text(json.dumps(note))
    status, text = run("list", "--config", config)
    assert status == 1
    assert f"ignored: {config.parent}/asleep/alpha.5.json: " in text


def test_tiers_and_what_is_wrong_in_them_are_listed(config: Path) -> None:
    """Where an image is whole or in part, what was set aside, and a tier that is not there."""
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
    found = json.loads(run("list", "--json", "--config", config)[1])
    assert [(one["tier"], one["key"]["job_id"]) for one in found["partial"]] == [("disk", 123)]
    assert found["images"] == []
    assert found["missing"] == [] or "not on a tmpfs" in found["missing"][0]
    assert run("list", "5", "--config", config)[0] == 0


def test_a_tier_that_is_not_looked_at_is_told(config: Path) -> None:
    """Whoever reads that all is well has to know what was not read."""
    (config.parent / "shared").rmdir()
    status, text = run("verify", "--quiet", "--config", config)
    assert status == 0
    assert f"not used: {config.parent}/shared: is not there" in text
    found = json.loads(run("verify", "--json", "--config", config)[1])
    assert found["missing"] == [f"{config.parent}/shared: is not there"]
    assert "not used: " in run("prune", "123", "--dry-run", "--config", config)[1]


def test_an_image_that_cannot_be_verified_here_does_not_hide_the_others(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package of its digests: each is named, with what to do."""
    monkeypatch.setattr(digest, "blake3", lambda: None)
    status, text = run("verify", "--quiet", "--config", config)
    assert status == 1
    assert text.endswith("alpha.123/0001: its digests are BLAKE3 (install the Python package blake3 on this node)\n")


def test_an_image_whose_job_ends_meanwhile_is_not_damaged(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent removes it while it is being read."""
    verify = DirectoryStore.verify

    def verified(store: DirectoryStore, image: Image, **settings: Any) -> None:
        store.remove(image)
        verify(store, image, **settings)

    monkeypatch.setattr(DirectoryStore, "verify", verified)
    assert run("verify", "--quiet", "--config", config) == (0, "no images\n")


def test_a_store_that_lets_nothing_go_does_not_keep_the_others(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All images of a job go, also what is there of a copy; what cannot is named, and the exit status is 1."""
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


def test_a_copy_that_is_being_made_is_listed(config: Path) -> None:
    """As far as it has come."""
    local, shared = (DirectoryStore(config.parent / name, KEY) for name in ("local", "shared"))
    image = local.get("alpha.123", 1)
    shared.copy(local.copy(image, shared), local)
    shared.cut(image, 10)
    with shared.take_up(image):
        assert "disk, shared " in run("list", "--config", config)[1]
        found = json.loads(run("list", "--json", "--config", config)[1])
        assert [one["tier"] for one in found["partial"]] == ["shared"]
    local.close()
    shared.close()


def test_where_there_is_no_key_is_no_node_with_an_agent(config: Path) -> None:
    """A login node: it is told where to look, and not to make a key."""
    (config.parent / "image.key").unlink()
    with pytest.raises(AffinodeError, match="has no key of images") as caught:
        run("list", "--config", config)
    assert "on a node with the agent" in (caught.value.hint or "")


def test_a_store_that_cannot_be_read_does_not_hide_the_others(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with the reason, and the exit status is 1."""
    size_of, names = rootdir.size_of, rootdir.names
    shared = (config.parent / "shared").stat().st_ino

    def failing(call: Callable[[int], Any]) -> Callable[[int], Any]:
        def one(at: int) -> Any:
            if os.fstat(at).st_ino == shared:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return call(at)

        return one

    monkeypatch.setattr(rootdir, "size_of", failing(size_of))
    monkeypatch.setattr(rootdir, "names", failing(names))
    status, text = run("list", "--config", config)
    assert status == 1
    assert "alpha.123" in text
    assert "shared: cannot be read: Stale file handle" in text
