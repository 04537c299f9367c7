"""Signatures of notes, claims, promises and the lease beside the shared store: only files signed for this job count."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from agent_site import STEPS, World
from agent_world import KEY, Agent
from job_owner import OWNER

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.image.manifest import former_signature
from slurm_affinode.checkpoint.image.signatures import LARGEST, SignatureError, Signer
from slurm_affinode.core.policy import Waiting
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.suspension.job.shepherd import Restored
from slurm_affinode.suspension.records.promises import Promises
from slurm_affinode.suspension.records.shared_state import Note, Notes, StartPlan
from slurm_affinode.suspension.records.sweep import Absences
from slurm_affinode.suspension.wake import Lease

from ..agent_sequences import resume_at_c2

NOTE = Note("alpha", 7, 5, 0, 1, 1000, "c1", 1, 1.0, "idle", 1, 2, 3, "auto")
RUN = LiveRun(JobKey("alpha", 7, 9), 1000, 1)
STRANGER = Signer(b"another key" * 4, "c1")


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    """Notes of one node, with one note in them."""
    made = Notes(tmp_path, Signer(KEY, "c1"))
    made.write(NOTE)
    return made


def again(tmp_path: Path) -> Notes:
    """Return the notes of another node, which has not read any yet."""
    return Notes(tmp_path, Signer(KEY, "c2"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A suspended job with its image in the stores of its node and in the shared store."""
    made = World(tmp_path)
    made.start_run("c1")
    made.start_script("c1", STEPS)
    agent = Agent(made, "c1")
    agent.suspend()
    agent.settle()
    return made


def of_older_release(world: World) -> dict[str, object]:
    """Convert image and note to those of a release that signed images with the cluster key, and did not sign notes."""
    for path in world.root.glob("*/images/alpha.7/0001/manifest.json"):
        path.with_name("manifest.hmac").write_text(former_signature(path.read_bytes(), KEY) + "\n")
    path = world.root / "shared" / "asleep" / "alpha.7.json"
    value = json.loads(path.read_text())
    later = (
        "version", "revision", "name", "signed_by", "hmac", "failures", "failed_epoch", "retry_epoch", "releases",
        "local_files", "tied", "required", "unavailable",
    )  # fmt: skip
    former = {key: item for key, item in value.items() if key not in later}
    path.write_text(json.dumps(former) + "\n")
    return former


def test_note_of_another_node_is_read(notes: Notes, tmp_path: Path) -> None:
    """A node that has just joined reads it, too."""
    assert again(tmp_path).all() == [NOTE]
    assert again(tmp_path).read("alpha", 7) == NOTE


def changed(path: Path) -> None:
    path.write_text(path.read_text().replace('"wake": "auto"', '"wake": "now"'))


def unsigned(path: Path) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps({key: item for key, item in value.items() if key not in ("hmac", "signed_by")}))


def half_signed(path: Path) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps({key: item for key, item in value.items() if key != "hmac"}))


def of_stranger(path: Path) -> None:
    path.write_text(STRANGER.encode("note", path.name, asdict(NOTE)))


def for_another_purpose(path: Path) -> None:
    path.write_text(Signer(KEY, "c1").encode("promise", path.name, asdict(NOTE)))


def in_another_name(path: Path) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "signed_by": "c2"}))


def of_another_job(path: Path) -> None:
    other = Notes(path.parents[1], Signer(KEY, "c1"))
    other.write(replace(NOTE, job_id=8))
    (path.parent / "alpha.8.json").replace(path)


def signed_nonsense(path: Path) -> None:
    path.write_text(Signer(KEY, "c1").encode("note", path.name, {**asdict(NOTE), "seq": "1"}))


def link(path: Path) -> None:
    path.replace(path.with_name("kept"))
    path.symlink_to("kept")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def large(path: Path) -> None:
    path.write_text(path.read_text() + " " * LARGEST)


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    "attack",
    [changed, unsigned, half_signed, of_stranger, for_another_purpose, in_another_name, of_another_job, signed_nonsense,
     link, pipe, large, open_to_others],
)  # fmt: skip
def test_forged_note_is_ignored_and_reported(notes: Notes, tmp_path: Path, attack: Callable[[Path], None]) -> None:
    """Without the cluster key, a writer to the shared store changes nothing."""
    path = tmp_path / "asleep" / "alpha.7.json"
    attack(path)
    signer = Signer(KEY, "c2")
    reader = Notes(tmp_path, signer)
    assert reader.read("alpha", 7) is None
    assert NOTE not in reader.all()
    assert list(signer.refused()) == [str(path)]
    path.unlink()
    reader.write(NOTE)
    assert reader.read("alpha", 7) == NOTE
    assert not signer.refused()


def test_note_of_another_version_is_ignored_and_reported(notes: Notes, tmp_path: Path) -> None:
    """A note without a version is of version 1."""
    path = tmp_path / "asleep" / "alpha.7.json"
    assert json.loads(path.read_text())["version"] == 1
    path.write_text(Signer(KEY, "c1").encode("note", path.name, asdict(NOTE)))
    assert again(tmp_path).read("alpha", 7) == NOTE
    path.write_text(Signer(KEY, "c1").encode("note", path.name, {"version": 2, **asdict(NOTE)}))
    signer = Signer(KEY, "c2")
    assert Notes(tmp_path, signer).read("alpha", 7) is None
    assert signer.refused() == {str(path): "is not a note: its version is 2, not 1"}


def test_replayed_note_is_ignored(notes: Notes, tmp_path: Path) -> None:
    """The owner has woken the job since: an earlier note of the same suspension does not revert that."""
    path = tmp_path / "asleep" / "alpha.7.json"
    before = path.read_bytes()
    notes.write(replace(NOTE, wake="now"))
    reader = again(tmp_path)
    assert reader.read("alpha", 7) == replace(NOTE, wake="now")
    path.write_bytes(before)
    assert reader.read("alpha", 7) is None
    reader.write(replace(NOTE, wake="now"))
    assert notes.read("alpha", 7) == replace(NOTE, wake="now")


def test_note_of_earlier_suspension_does_not_restart_job(world: World) -> None:
    """That suspension's image was abandoned; the current image is of a later attempt, and is restored."""
    path = world.root / "shared" / "asleep" / "alpha.7.json"
    agent = Agent(world, "c2")
    (note,) = agent.notes.all()
    Notes(world.root / "shared", Signer(KEY, "c1")).write(replace(note, submit=note.submit - 100, given_up=True))
    assert json.loads(path.read_text())["given_up"] is True
    for item in world.root.glob("*/images/alpha.7/*"):
        os.utime(item, (0, 0))
    agent.keeper.sweep(True)
    assert agent.images(shared=True) == [1]
    world.start_run("c2")
    world.nodes["c1"].init = None
    assert agent.restore() == Restored(2)
    assert world.steps() == [STEPS]


def test_note_of_older_release_is_read_if_it_matches_image(world: World) -> None:
    """The file is one written by a release without signatures; the next write signs it."""
    former = of_older_release(world)
    assert sorted(former) == sorted(
        ["cluster", "job_id", "submit", "restarts", "seq", "uid", "node", "began_ms", "since_epoch", "why", "gpus",
         "gpu_bytes", "image_bytes", "wake", "user", "shown", "failure", "trouble", "passed", "released_epoch",
         "given_up"]
    )  # fmt: skip
    agent = Agent(world, "c2")
    (note,) = agent.notes.all()
    assert (note.wake, note.why, note.uid) == ("auto", "idle 15m", OWNER.uid)
    agent.waker.wake(note.key, "alice")
    assert not world.held
    assert "hmac" in json.loads((world.root / "shared" / "asleep" / "alpha.7.json").read_text())
    resume_at_c2(world)


@pytest.mark.parametrize("change", [{"seq": 2}, {"uid": 4711}, {"began_ms": 5}, {"node": "c9"}, {"restarts": 5}])
def test_note_of_older_release_without_matching_image_is_ignored(world: World, change: dict[str, object]) -> None:
    """Without a signature, the note must agree with its image, which is signed."""
    path = world.root / "shared" / "asleep" / "alpha.7.json"
    path.write_text(json.dumps({**of_older_release(world), **change}))
    assert Agent(world, "c2").notes.all() == []


def test_unsigned_note_does_not_abandon_image(world: World) -> None:
    """The image is kept even if an older release wrote it."""
    path = world.root / "shared" / "asleep" / "alpha.7.json"
    path.write_text(json.dumps({**of_older_release(world), "given_up": True}))
    for item in world.root.glob("*/images/alpha.7/*"):
        os.utime(item, (0, 0))
    agent = Agent(world, "c2")
    agent.keeper.sweep(True)
    assert agent.images(shared=True) == [1]
    resume_at_c2(world)


def test_unsigned_note_of_signed_image_is_ignored(world: World) -> None:
    """The image is of a release that signs notes: the signature has been removed."""
    path = world.root / "shared" / "asleep" / "alpha.7.json"
    unsigned(path)
    assert Agent(world, "c2").notes.all() == []


@pytest.mark.parametrize(
    "text",
    ["c9/1/1", "{}", "", STRANGER.encode("claim", "alpha.7.1", {"who": "c9/1/1", "submit": 9, "uid": 1000}),
     Signer(KEY, "c9").encode("claim", "alpha.8.1", {"who": "c9/1/1", "submit": 9, "uid": 1000}),
     Signer(KEY, "c9").encode("claim", "alpha.7.1", {"who": "c9/1/1", "submit": 5, "uid": 1000}),
     Signer(KEY, "c9").encode("claim", "alpha.7.1", {"who": "c9/1/1", "submit": 9, "uid": 1001})],
)  # fmt: skip
def test_forged_claim_does_not_prevent_restore(tmp_path: Path, text: str) -> None:
    """Claims of other jobs, and of earlier jobs with the same ID, are ignored as well."""
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "alpha.7.1").write_text(text)
    signer = Signer(KEY, "c1")
    notes_of_c1 = Notes(tmp_path, signer)
    assert notes_of_c1.claim(RUN, "c1/10/5") is None
    assert signer.refused()
    assert again(tmp_path).claim(RUN, "c2/10/5") == "c1/10/5"
    assert [path.name for path in (tmp_path / "claims").iterdir()] == ["alpha.7.1"]


def test_claim_of_older_release_counts_for_its_images(tmp_path: Path) -> None:
    """An agent that is not upgraded yet may be restoring the job."""
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "alpha.7.1").write_text("c2/4711/815")
    notes_of_c1 = Notes(tmp_path, Signer(KEY, "c1"))
    assert notes_of_c1.claim(RUN, "c1/10/5", former=True) == "c2/4711/815"
    assert notes_of_c1.claim(RUN, "c2/4711/815", former=True) is None
    assert notes_of_c1.claim(RUN, "c1/10/5") is None


def test_forged_plan_is_ignored(tmp_path: Path) -> None:
    """The plan is ignored, as if Slurm had none."""
    notes_of_c1 = Notes(tmp_path, Signer(KEY, "c1"))
    plan = {7: StartPlan(100.0, ("c1", "c2"))}
    notes_of_c1.write_plan("alpha", plan)
    assert again(tmp_path).plan("alpha") == plan
    for text in (
        '{"7": [100.0, ["c1"]]}',
        STRANGER.encode("start plan", "plan.alpha.json", {"starts": {"7": [1.0, ["c1"]]}}),
    ):
        (tmp_path / "plan.alpha.json").write_text(text)
        assert again(tmp_path).plan("alpha") == {}


@pytest.mark.parametrize(
    "text",
    ['{"node": "c2", "until": 120.0}', STRANGER.encode("waker lease", "waker.json", {"node": "c2", "until": 120.0}),
     Signer(KEY, "c3").encode("waker lease", "waker.json", {"node": "c2", "until": 120.0})],
)  # fmt: skip
def test_forged_lease_does_not_prevent_waking(tmp_path: Path, text: str) -> None:
    """Leases of older releases are overridden; leases signed by another node are ignored."""
    path = tmp_path / "waker.json"
    path.write_text(text)
    assert Lease(path, Signer(KEY, "c1")).held(100.0, 8)
    assert not Lease(path, Signer(KEY, "c2")).held(101.0, 8)


@pytest.mark.parametrize(
    "text",
    ['{"job": 99, "node": "c2", "gpus": 1, "until": 1500.0}',
     STRANGER.encode("promise", "test.99.0", {"job": 99, "node": "c1", "gpus": 1, "until": 1500.0}),
     Signer(KEY, "c3").encode("promise", "test.99.0", {"job": 99, "node": "c2", "gpus": 1, "until": 1500.0}),
     Signer(KEY, "c2").encode("promise", "test.99.0", {"job": 99, "node": "c2", "gpus": 1, "until": 1e12})],
)  # fmt: skip
def test_forged_promise_is_ignored(tmp_path: Path, text: str) -> None:
    """A pending job that a forged promise assigns to another node is served nevertheless."""
    (tmp_path / "promises").mkdir()
    (tmp_path / "promises" / "test.99.0").write_text(text)
    promises_of_c1 = Promises(tmp_path, "test", Signer(KEY, "c1"), lasts_s=600, now=lambda: 1000.0)
    promises_of_c1.refresh()
    assert promises_of_c1.known() == ()
    (tmp_path / "promises" / "test.99.0").write_text(text)
    waiting = Waiting(99, "99", ("gpu",), "Resources", is_held=False, priority=1, gpus=1)
    assert promises_of_c1.take(waiting, 1) == "test.99.0"


def test_forged_absence_does_not_hasten_removal(tmp_path: Path) -> None:
    """The time since when Slurm does not know a job must be signed by a node."""
    absences = Absences(tmp_path, Signer(KEY, "c1"), "alpha", keep_s=100.0, clock=lambda directory, node: 1000.0)
    (tmp_path / "unknown").mkdir()
    path = tmp_path / "unknown" / "alpha.7.json"
    value = {"since": 1.0, "confirmed": True}
    for text in (json.dumps(value), STRANGER.encode("unknown job", path.name, value),
                 Signer(KEY, "c2").encode("unknown job", "alpha.8.json", value)):  # fmt: skip
        path.write_text(text)
        assert not absences.update((), ("alpha.7",))["alpha.7"].due
    path.write_text(Signer(KEY, "c2").encode("unknown job", path.name, value))
    assert absences.update((), ("alpha.7",))["alpha.7"].due


def use_notes(root: Path) -> None:
    notes = Notes(root, Signer(KEY, "c1"))
    with contextlib.suppress(AffinodeError):
        notes.write(NOTE)
    notes.remove("alpha", 7)


def use_claims(root: Path) -> None:
    notes = Notes(root, Signer(KEY, "c1"))
    with contextlib.suppress(AffinodeError):
        notes.claim(RUN, "c1/10/5")
    notes.unclaim("alpha", ())


def use_promises(root: Path) -> None:
    promises = Promises(root, "alpha", Signer(KEY, "c1"), lasts_s=600, now=lambda: 1000.0)
    promises.refresh()
    with contextlib.suppress(AffinodeError):
        promises.take(Waiting(7, "7", ("gpu",), "Resources", is_held=False, priority=1, gpus=1), 1)


def use_absences(root: Path) -> None:
    absences = Absences(root, Signer(KEY, "c1"), "alpha", keep_s=100.0)
    with contextlib.suppress(AffinodeError):
        absences.update((), ("alpha.7",))
    with contextlib.suppress(AffinodeError):
        absences.confirm(("alpha.7",))
    absences.all()


@pytest.mark.parametrize(
    ("name", "use"),
    [("asleep", use_notes), ("claims", use_claims), ("promises", use_promises), ("unknown", use_absences)],
)
def test_link_in_place_of_a_directory_is_not_followed(tmp_path: Path, name: str, use: Callable[[Path], None]) -> None:
    """A writer of the export would otherwise have root create and remove files anywhere on the node."""
    beside, target = tmp_path / "beside", tmp_path / "etc"
    beside.mkdir()
    use(beside)
    assert (beside / name).is_dir()  # it is the one that is used
    shutil.rmtree(beside / name)
    target.mkdir()
    names = ["alpha.7.json", "alpha.7.1", "alpha.7.0", "alpha.cf"]
    for item in names:
        (target / item).write_text("of the node")
    (beside / name).symlink_to(target)
    use(beside)
    assert {path.name: path.read_text() for path in target.iterdir()} == dict.fromkeys(names, "of the node")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 60_000, b'{"a": NaN}', b'"x"', b"1" * 5000]
)
def test_malformed_data_is_rejected(data: bytes) -> None:
    """The only error raised is ``SignatureError``."""
    with pytest.raises(SignatureError):
        Signer(KEY, "c1").decode("note", "alpha.7.json", data)
