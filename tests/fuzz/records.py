"""Files that agents write for each other and for themselves: manifests, notes, claims, promises, journals, indexes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutation import mutated, mutated_json, some
from fuzz.places import directory, put
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.agent import hook_records
from slurm_affinode.agent.hook_records import GpuNumbers
from slurm_affinode.base.pidfd import Id
from slurm_affinode.checkpoint.criu import cpu_affinity
from slurm_affinode.checkpoint.files import deleted_files, inet_sockets, local_files
from slurm_affinode.checkpoint.files.created_files import CreatedFilesOfJobs
from slurm_affinode.checkpoint.files.scratch_files import ScratchFiles, ScratchRules
from slurm_affinode.checkpoint.files.scratch_record import RecordError, ScratchRecords
from slurm_affinode.checkpoint.image import manifest
from slurm_affinode.checkpoint.image.criu_images import BadImage
from slurm_affinode.checkpoint.image.signatures import NAME, SIGNER, SignatureError, Signer
from slurm_affinode.checkpoint.interface import ImageDamaged, RestoreFailed
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model import ledger
from slurm_affinode.model.suspension import (
    FileFact,
    GpuFact,
    JobKey,
    LiveRun,
    Manifest,
    Notice,
    Phase,
    SavedOutput,
    SuspendOption,
    Versions,
)
from slurm_affinode.suspension import wake
from slurm_affinode.suspension.inplace.sleeper import Sleeper
from slurm_affinode.suspension.records import journal, promises, record, shared_state
from slurm_affinode.suspension.wake import Lease


def _json(value: Any, words: Sequence[bytes] = ()) -> Callable[[Random], bytes]:
    plain = json.loads(json.dumps(value))
    return lambda rng: mutated_json(rng, plain, words)


_KEY = b"k" * 32
_MANIFEST = Manifest(
    JobKey("main", 7, 1700000000),
    2,
    2001,
    100,
    "c1",
    1,
    1700000100.5,
    1700000160.25,
    SuspendOption(900, 2.5, signal=Notice("USR1", 60)),
    Versions("1.0", "6.1.0", "4.1.1", "24.11.5", "580.65"),
    17,
    (17, 18),
    (GpuFact("GPU-1", "H100", 80 << 30, held_bytes=1 << 30),),
    1 << 30,
    (SavedOutput(0, "null", "/dev/null"), SavedOutput(1, "file", "/home/a/out", "out.1", size=10, append=True)),
    (FileFact("criu/pages-1.img", 4096, "00" * 32), FileFact("out.1", 10, "11" * 32)),
)
_NOTE = shared_state.Note(
    "main",
    7,
    1700000000,
    1,
    2,
    2001,
    "c1",
    1700000100000,
    1700000160.5,
    "idle 15m",
    1,
    1 << 30,
    2 << 30,
    "auto",
    "alice",
    "7_1",
    None,
    "trouble",
    None,
    failures=1,
    failed_epoch=1700000180.0,
    retry_epoch=1700000240.0,
    released_epoch=1700000200.0,
    releases=2,
    local_files="tied to c1: 3 files and directories in /tmp, 2.0 GiB (more than 1.0 GiB)",
    tied=True,
    required="c1,c2",
    unavailable=None,
)
_PLAIN_NOTE = json.loads(json.dumps(dataclasses.asdict(_NOTE)))
_SIGNED_NOTE = Signer(_KEY, "c1").encode("note", "main.7.json", _PLAIN_NOTE).encode()
_claimed = _json({"who": "c1/17/12345", "submit": 1700000000, "uid": 2001})
_ENTRY = ledger.LedgerEntry("main", 7, 1700000000, 1700000100000, 1, "alice", 2001, "vision", "gpu", "c1", gpus=2)


def _sound(record: Any) -> None:
    """Check that each field has a value of its type. Raises ``Wrong``."""
    for name, kinds in _hints(type(record)):
        value = getattr(record, name)
        if not any(_is(value, each) for each in kinds):
            raise Wrong(f"{type(record).__name__}.{name} is {value!r:.80}, not {kinds}")


@functools.cache
def _hints(kind: type) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the fields with their types."""
    return [
        (name, typing.get_args(type_hint) or (type_hint,)) for name, type_hint in typing.get_type_hints(kind).items()
    ]


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@contextlib.contextmanager
def _file(check: Callable[[Path], bool]) -> Iterator[Check]:
    """Yield a check of a reader of one file."""
    logging.disable(logging.CRITICAL)
    with directory() as place:
        path = place / "file"

        def run(data: bytes) -> bool:
            put(str(path), data)
            return check(path)

        yield run


@contextlib.contextmanager
def _manifest() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        with contextlib.suppress(ImageDamaged):
            manifest.decode(data, b"0" * 64, _KEY)
            raise Wrong("a manifest without a signature is accepted")
        text = manifest.decode(data, manifest.sign(data, _KEY, "c1").encode() + b"\n", _KEY)
        again = manifest.encode(text)
        if manifest.decode(again, manifest.sign(again, _KEY, "c1").encode(), _KEY) != text:
            raise Wrong(f"{text} is another one when it is written and read again")
        for part in (text, text.key, text.versions, *text.gpus, *text.outputs, *text.files):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if isinstance(value, float) and not math.isfinite(value):
                    raise Wrong(f"{field.name} is {value}")
        manifest.summary(text)
        return True

    yield check


def _signed(purpose: str, name: str, data: bytes, signer: Signer) -> bytes:
    """Sign the data as a malicious node with the cluster key would; data other than a JSON object stays unchanged."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            return signer.encode(purpose, name, value).encode()
    return data


@contextlib.contextmanager
def _signature() -> Iterator[Check]:
    """Without the key, a writer changes nothing."""
    signer = Signer(_KEY, "c1")

    def check(data: bytes) -> bool:
        text = signer.decode("note", "main.7.json", data)
        if {key: item for key, item in text.items() if key not in (NAME, SIGNER)} != _PLAIN_NOTE:
            raise Wrong(f"{text} was never signed")
        return True

    yield check


@contextlib.contextmanager
def _notes() -> Iterator[Check]:
    """A damaged note is ignored, and hides no other."""
    logging.disable(logging.CRITICAL)
    with directory() as root:
        (root / "asleep").mkdir()
        signer = Signer(_KEY, "c2")
        beside = shared_state.Notes(root, signer)
        beside._ask = lambda call, late=None: call()  # type: ignore[assignment]
        beside.write(dataclasses.replace(_NOTE, job_id=8))

        def check(data: bytes) -> bool:
            put(str(root / "asleep" / "main.7.json"), _signed(shared_state._NOTE, "main.7.json", data, signer))
            beside._revisions.clear()
            result = beside.all()
            if not any(job.job_id == 8 for job in result):
                raise Wrong("the note of another job does not exist")
            for figure in result:
                _sound(figure)
                _ = (figure.key, figure.problem)
            return len(result) > 1

        yield check


@contextlib.contextmanager
def _plan() -> Iterator[Check]:
    logging.disable(logging.CRITICAL)
    with directory() as root:
        signer = Signer(_KEY, "c2")
        beside = shared_state.Notes(root, signer)
        beside._ask = lambda call, late=None: call()  # type: ignore[assignment]

        def check(data: bytes) -> bool:
            put(str(root / "plan.alpha.json"), _signed(shared_state._PLAN, "plan.alpha.json", data, signer))
            result = beside.plan("alpha")
            for job, plan in result.items():
                if not isinstance(job, int) or not all(isinstance(node, str) for node in plan.nodes):
                    raise Wrong(f"{job}: {plan}")
                if not math.isfinite(plan.start_epoch):
                    raise Wrong(f"{plan} has no time")
            return bool(result)

        yield check


@contextlib.contextmanager
def _claims() -> Iterator[Check]:
    logging.disable(logging.CRITICAL)
    with directory() as root:
        signer = Signer(_KEY, "c2")
        beside = shared_state.Notes(root, signer)
        run = LiveRun(JobKey("main", 7, 1700000000), 2001, 1)
        path = root / "claims" / "main.7.1"
        path.parent.mkdir()

        def check(data: bytes) -> bool:
            put(str(path), _signed(shared_state._CLAIMED, path.name, data, signer))
            result, _ = beside._claimant(path, run, former=data.startswith(b"c"))
            if not isinstance(result, str | None):
                raise Wrong(repr(result))
            return result is not None

        yield check


@contextlib.contextmanager
def _promise() -> Iterator[Check]:
    logging.disable(logging.CRITICAL)
    with directory() as root:
        signer = Signer(_KEY, "c2")
        promise_store = promises.Promises(root, "main", Signer(_KEY, "c1"), lasts_s=600, now=lambda: 1700000000.0)
        path = root / "main.7.0"

        def check(data: bytes) -> bool:
            put(str(path), _signed(promises._PURPOSE, path.name, data, signer))
            result = promise_store._read(path)
            if result is None:
                return False
            _sound(result.promise)
            if not math.isfinite(result.until) or result.promise.node != "c2":
                raise Wrong(f"{result}")
            return True

        yield check


@contextlib.contextmanager
def _lease() -> Iterator[Check]:
    logging.disable(logging.CRITICAL)
    with directory() as root:
        signer = Signer(_KEY, "c2")
        path = root / "waker.alpha.json"
        lease = Lease(path, Signer(_KEY, "c1"), calls=lambda call: call())  # type: ignore[arg-type]

        def check(data: bytes) -> bool:
            before = _signed(wake._LEASE, path.name, data, signer)
            put(str(path), before)
            held = lease.held(1700000000.0, 60.0)
            if not held and path.read_bytes() != before:
                raise Wrong("a lease of another node was replaced")
            return held

        yield check


@contextlib.contextmanager
def _journal() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        entries, end, damage = journal.parse(data)
        if not 0 <= end <= len(data) or (damage is not None and not isinstance(damage, str)):
            raise Wrong(f"{end} of {len(data)}, {damage!r}")
        for entry in entries:
            if not isinstance(entry.phase, Phase) or not math.isfinite(entry.time_epoch):
                raise Wrong(f"{entry}")
            if record.decode(json.loads(json.dumps(record.encode(entry.facts)))) != entry.facts:
                raise Wrong(f"{entry.facts} are others when they are written and read again")
        again = journal.parse(data[:end])
        if again != (entries, end, None):
            raise Wrong(f"{again} of what was read as {entries}")
        with contextlib.suppress(journal.JournalError):
            job = journal.JobJournal(JobKey("main", 7, 1700000000), Path("main.7.1700000000.jsonl"), entries)
            _sound(job.record.ledger_entry("c1"))
            _sound(job.record.note("c1", 1700000000.5))
            job.record.mail("suspended", "c1", 1700000000.5)
            Sleeper.of(job)
        return bool(entries)

    yield check


_JOURNALS = [
    [json.loads(line) for line in path.read_text().splitlines()]
    for path in sorted((Path(__file__).parents[1] / "data" / "suspension" / "journal").iterdir())
]


def _journal_lines(rng: Random) -> bytes:
    values = [line | {"phase": some(rng, list(Phase))} for line in some(rng, _JOURNALS)[: 1 + int(rng.random() * 4)]]
    changed = some(rng, range(len(values)))
    lines = [
        mutated_json(rng, value) if at == changed else json.dumps(value).encode() for at, value in enumerate(values)
    ]
    return mutated(rng, b"\n".join(lines) + b"\n", (b"\n", b"\r\n", b"\x85"))


@contextlib.contextmanager
def _ledger() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        text = ledger.decode(data.decode("utf-8", "replace"))
        _sound(text)
        if ledger.decode(ledger.encode(text)) != text:
            raise Wrong(f"{text} is another one when it is written and read again")
        return True

    yield check


def _numbers_check(path: Path) -> bool:
    gpu_numbers = GpuNumbers(path)
    for job, numbers in gpu_numbers.data.items():
        if not isinstance(job, int) or not all(isinstance(number, int) for number in numbers):
            raise Wrong(repr(gpu_numbers.data)[:200])
    return bool(gpu_numbers.data)


def _leftovers_check(path: Path) -> bool:
    leftover_reports = hook_records.LeftoverReports(path)
    rows = leftover_reports.all()
    if not all(isinstance(row["id"], str) and isinstance(row["job"], int) for row in rows):
        raise Wrong(repr(rows)[:200])
    json.dumps(rows)
    return bool(rows)


@contextlib.contextmanager
def _local_files() -> Iterator[Check]:
    """Nothing is created outside the permitted directories, and no file of another job is replaced.

    The node has a file of another job, and one that an earlier restore of the job has created.
    """
    with directory() as place:
        image, root, proc = place / "image", place / "root", place / "proc"
        for item in (image, root / "tmp", root / "etc", proc / "5"):
            item.mkdir(parents=True)
        (proc / "5" / "root").symlink_to(root)
        put(str(proc / "5" / "stat"), b"5 (x) S" + b" 1" * 49)
        put(str(proc / "5" / "status"), b"Name:\tx\nUid:\t2001\t2001\t2001\t2001\nGroups:\t\n")
        put(str(image / "local-0"), b"content")
        _give(str(root), str(root / "tmp"), str(root / "etc"))
        before = sorted(os.listdir(root / "etc"))
        fd, copy = os.open(image, os.O_RDONLY), os.open(image / "local-0", os.O_RDONLY)
        created = CreatedFilesOfJobs(place / "created-files").of(_MANIFEST.key, _OWNER.uid)

        def contents(name: str) -> int:
            if name != "local-0":
                raise ImageDamaged(f"{name}: there is none")
            return copy

        def restore_files(data: bytes) -> dict[str, tuple[int, int]]:
            put(str(image / local_files.INDEX), data)
            return local_files.restore_files(
                Id(5, 1), fd, contents, _OWNER, created=created, places=("/tmp",), proc=proc
            )

        def check(data: bytes) -> bool:
            restore_files(json.dumps(_LOCAL | {"files": _LOCAL["files"][:2]}).encode())  # type: ignore[index]
            put(f"{root}/tmp/d/f", b"newer than the content")
            for name in _OTHERS:
                put(f"{root}/tmp/{name}", b"other")
                _give(f"{root}/tmp/{name}")
            others = [os.lstat(root / "tmp" / name) for name in _OTHERS]
            try:
                made = restore_files(data)
            finally:
                odd = [path.name for path in root.iterdir() if path.name not in ("tmp", "etc")]
                if odd or sorted(os.listdir(root / "etc")) != before:
                    raise Wrong(f"made outside of its places: {odd}")
                if [os.lstat(root / "tmp" / name) for name in _OTHERS] != others:
                    raise Wrong("the file of another job was replaced")
                _empty(root / "tmp")
            return bool(made)

        try:
            yield check
        finally:
            os.close(copy)
            os.close(fd)


@contextlib.contextmanager
def _scratch() -> Iterator[Check]:
    """Nothing is created outside the node-local directories, and no file of another job is replaced."""
    with directory() as place:
        root, proc = place / "root", place / "proc"
        for item in (root / "tmp" / "d", root / "etc", proc / "5"):
            item.mkdir(parents=True)
        (proc / "5" / "root").symlink_to(root)
        put(str(proc / "5" / "stat"), b"5 (x) S" + b" 1" * 49)
        put(str(proc / "5" / "status"), b"Name:\tx\nUid:\t2001\t2001\t2001\t2001\nGroups:\t\n")
        put(str(place / "data"), b"content")
        _give(str(root), str(root / "tmp"), str(root / "tmp" / "d"), str(root / "etc"))
        files = ScratchFiles(ScratchRules(), proc=proc)
        data = os.open(place / "data", os.O_RDONLY)
        record = ScratchRecords(place / "scratch").of(_MANIFEST.key, _OWNER.uid)

        def check(index: bytes) -> bool:
            (root / "tmp" / "d").mkdir(exist_ok=True)
            for name in _OTHERS:
                put(f"{root}/tmp/{name}", b"other")
            _give(f"{root}/tmp/d", *(f"{root}/tmp/{name}" for name in _OTHERS))
            others = [os.lstat(root / "tmp" / name) for name in _OTHERS]
            try:
                restored = files.restore_files(Id(5, 1), index, data, _OWNER, record, timeout_s=10)
            finally:
                odd = [path.name for path in root.iterdir() if path.name not in ("tmp", "etc")]
                if odd or os.listdir(root / "etc"):
                    raise Wrong(f"made outside of its places: {odd}")
                if [os.lstat(root / "tmp" / name) for name in _OTHERS] != others:
                    raise Wrong("the file of another job was replaced")
                _empty(root / "tmp")
                record.path.unlink(missing_ok=True)
            return bool(restored.inodes)

        try:
            yield check
        finally:
            os.close(data)


def _scratch_record_check(path: Path) -> bool:
    record = ScratchRecords(path.parent).of(_MANIFEST.key, 0)
    record.path.unlink(missing_ok=True)
    path.rename(record.path)
    try:
        facts = record.read()
    except RecordError:
        return False
    record.write(lambda read: read)
    if record.read() != facts:
        raise Wrong(f"{facts}")
    return bool(facts.created)


def _created_check(path: Path) -> bool:
    record = CreatedFilesOfJobs(path.parent).of(_MANIFEST.key, 0)
    record.path.unlink(missing_ok=True)
    path.rename(record.path)
    result = record.read()
    record.write(result)
    if record.read() != result:
        raise Wrong(f"{result}")
    return bool(result)


def _give(*paths: str) -> None:
    """Give the owner of the job files of root."""
    for path in paths if os.geteuid() == 0 else ():
        os.chown(path, _OWNER.uid, _OWNER.gid)


def _empty(place: Path) -> None:
    for base, directories, files in os.walk(place, topdown=False):
        for name in files:
            os.unlink(f"{base}/{name}")
        for name in directories:
            path = f"{base}/{name}"
            if os.path.islink(path):
                os.unlink(path)
            else:
                os.rmdir(path)


_OWNER = User(2001, 2001)
_LOCAL = {
    "uid": _OWNER.uid,
    "gid": _OWNER.gid,
    "files": [
        {"path": "/tmp/d", "kind": "directory", "mode": 0o700, "copy": None, "size": 0},
        {"path": "/tmp/d/f", "kind": "file", "mode": 0o600, "copy": "local-0", "size": 7},
        {"path": "/tmp/d/g", "kind": "link", "mode": 0o600, "copy": "/tmp/d/f", "size": 0},
        {"path": "/tmp/p", "kind": "fifo", "mode": 0o600, "copy": None, "size": 0},
    ],
}
_OTHERS = ("q", "d/f2")
_CREATED = {
    "uid": 0, "submit": 1700000000, "version": 1,
    "files": {"/tmp/d/f": {"device": 23, "handle": "0800000001000000"}},
}  # fmt: skip
_SCRATCH = {
    "version": 1, "uid": _OWNER.uid, "tied": None,
    "files": [
        {
            "place": "/tmp", "path": path, "kind": kind, "mode": mode, "gid": 2001,
            "mtime_ns": 1_700_000_000_000_000_007,
            "inode": 77, "device": 23, "size": size, "at": 0, "target": target, "new": True,
        }
        for path, kind, mode, size, target in (
            ("d", "directory", 0o700, 0, ""), ("d/f", "file", 0o640, 7, ""), ("d/g", "link", 0o640, 0, "d/f"),
            ("p", "fifo", 0o600, 0, ""), ("s", "symlink", 0o777, 0, "/etc/x"),
        )
    ],
}  # fmt: skip
_SCRATCH_RECORD = {
    "uid": 0, "submit": 1700000000, "periods": [[1700000000.5, 1700000100.5]], "required": "c1,c2", "version": 1,
    "created": {"/tmp/d/f": {"device": 23, "handle": "0800000001000000"}},
}  # fmt: skip
_AFFINITIES = {"5001": [0, 1], "5002": [3]}
_ADDRESSES = {"10.0.0.1": "eth0", "fd00::1": "eth0", "fe80::1": "ib0"}
_HOSTS = (b"::ffff:10.0.0.1", b"fe80::1%eth0", b"10.0.0.256", b"010.0.0.1")
_REMAPS = {
    "uid": 0,
    "gid": 0,
    "files": [{"directory": "/tmp/d", "name": "link_remap.5", "aside": ".link_remap.77.1", "inode": 77}],
}


@contextlib.contextmanager
def _addresses() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        recorded = inet_sockets.recorded(data)
        for address, name in recorded.items():
            if address.version not in (4, 6) or not isinstance(name, str):
                raise Wrong(f"{address} of {name}")
        return bool(recorded)

    yield check


@contextlib.contextmanager
def _affinities() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        recorded = cpu_affinity.recorded(data)
        for thread, positions in recorded.items():
            if thread < 0 or not positions or positions[0] < 0 or sorted(positions) != positions:
                raise Wrong(f"thread {thread} at {positions}")
        return bool(recorded)

    yield check


@contextlib.contextmanager
def _remaps() -> Iterator[Check]:
    with directory() as image:
        fd = os.open(image, os.O_RDONLY)

        def check(data: bytes) -> bool:
            put(str(image / deleted_files.INDEX), data)
            owner, result = deleted_files._read(fd)
            for item in result:
                _sound(item)
                if not all(0 <= number < 2**32 - 1 for number in owner):
                    raise Wrong(f"a user {owner}")
                if "/" in item.name or "/" in item.aside or "\0" in item.directory + item.name + item.aside:
                    raise Wrong(f"{item} is not a name in a directory")
            return bool(result)

        try:
            yield check
        finally:
            os.close(fd)


_PATHS = (b"/tmp/../etc/x", b"/etc/passwd", b"/tmp//d", b"/tmp/.", b"/tmp/..", b"4294967296", b"-1", b"symlink", b"..")
TARGETS = (
    Target(
        "manifest",
        "manifest.json of an image, signed",
        _json(manifest._plain(_MANIFEST), (b"criu/", b"stopped_pids")),
        _manifest,
        (ImageDamaged,),
    ),
    Target(
        "signature",
        "signed files beside the shared store, changed by others",
        lambda rng: mutated(rng, _SIGNED_NOTE, (b'"hmac": ', b'"signed_by": "c2"', b'"uid": 0')),
        _signature,
        (SignatureError,),
    ),
    Target("note", "notes beside the shared store", _json(_PLAIN_NOTE), _notes),
    Target("plan", "plan.CLUSTER.json beside the store", _json({"starts": {"7": [1700000000.5, ["c1"]]}}), _plan),
    Target(
        "claim",
        "claims beside the shared store",
        lambda rng: some(rng, (_claimed(rng), mutated(rng, b"c1/17/12345"))),
        _claims,
        (OSError,),
    ),
    Target(
        "promise",
        "promises beside the shared store",
        _json({"job": 7, "node": "c2", "gpus": 2, "until": 1700000100.5}),
        _promise,
    ),
    Target("lease", "waker.CLUSTER.json beside the shared store", _json({"node": "c2", "until": 1700000030.0}), _lease),
    Target("journal", "journals of suspensions", _journal_lines, _journal),
    Target("ledger", "lines of the ledger", _json(json.loads(ledger.encode(_ENTRY))), _ledger, (ValueError,)),
    Target(
        "gpu-numbers", "gpus.json of the run directory", _json({"7": [0, 1], "8": []}), lambda: _file(_numbers_check)
    ),
    Target(
        "leftovers",
        "reports of leftovers",
        _json({"id": "a1", "node": "c1", "job": 7, "dirty": ["x"], "left": []}),
        lambda: _file(_leftovers_check),
    ),
    Target(
        "local-files",
        "local.json of an image, restored",
        _json(_LOCAL, (*_PATHS, b"/tmp/q", b"/tmp/d/f2")),
        _local_files,
        (RestoreFailed,),
    ),
    Target(
        "scratch-files",
        "scratch.json of an image, restored",
        _json(_SCRATCH, (*_PATHS, b"q", b"d/f2", b"s/x", b"/root", b"/etc")),
        _scratch,
        (RestoreFailed,),
    ),
    Target(
        "scratch-record", "JOBID.json of scratch", _json(_SCRATCH_RECORD, _PATHS), lambda: _file(_scratch_record_check)
    ),
    Target("created-files", "JOBID.json of created-files", _json(_CREATED, _PATHS), lambda: _file(_created_check)),
    Target("affinities", "affinities.json of an image", _json(_AFFINITIES, (b"0", b"-1")), _affinities, (BadImage,)),
    Target("addresses", "addresses.json of an image", _json(_ADDRESSES, _HOSTS), _addresses, (BadImage,)),
    Target("remaps", "remaps.json of an image", _json(_REMAPS, _PATHS), _remaps, (RestoreFailed,)),
)
