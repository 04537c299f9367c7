"""Earlier releases' files stay readable: journals, ledgers, notes and the manifest in ``tests/data/suspension``."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_site import SUBMIT
from agent_world import KEY

from slurm_affinode.checkpoint.image import manifest
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.model import ledger
from slurm_affinode.model.suspension import JobKey, Phase
from slurm_affinode.suspension.inplace.sleeper import Sleeper
from slurm_affinode.suspension.inplace.sockets import states_of
from slurm_affinode.suspension.notify import OwnerMails
from slurm_affinode.suspension.records.journal import JobJournal, Journal
from slurm_affinode.suspension.records.record import decode, encode
from slurm_affinode.suspension.records.shared_state import Note, Notes

DATA = Path(__file__).parents[3] / "data" / "suspension"
EXPECTED = json.loads((DATA / "expected.json").read_text())
JOB = JobKey("alpha", 7, round(SUBMIT.timestamp()))
LATER = 1760009999.0
IN_PLACE = sorted(name for name, item in EXPECTED.items() if item["sleeper"] is not None)
OF_A_SLEEPER = ("job_id", "init_pid", "init_started", "why", "since_epoch", "on_request")


@pytest.fixture(autouse=True)
def in_order() -> None:
    """Accept any order of phases: one journal is of a job that was restored before its journal was closed."""


def journal_of(directory: Path, lines: bytes) -> JobJournal:
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / f"{JOB.name}.{JOB.submit_epoch}.jsonl").write_bytes(lines)
    return Journal(directory).of_job(JOB)


def recorded(name: str) -> list[bytes]:
    return (DATA / "journal" / f"{name}.jsonl").read_bytes().splitlines(keepends=True)


LATER_FACTS = {
    field.name: field.default
    for field in fields(Note)
    if field.name
    in {"failures", "failed_epoch", "retry_epoch", "releases", "local_files", "tied", "required", "unavailable"}
}
"""Facts of notes that this release has added, with their values in earlier ones."""


def known(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_fact_of_recorded_journal_is_read_in_each_phase(tmp_path, name):
    """A journal that ends after any of the lines has the facts of the lines so far."""
    lines = recorded(name)
    facts: dict[str, object] = {}
    for number, line in enumerate(lines, start=1):
        value = json.loads(line)
        facts |= value["facts"]
        journal = journal_of(tmp_path, b"".join(lines[:number]))
        record = journal.record
        assert (journal.phase, record.phase, journal.damage) == (Phase(value["phase"]), Phase(value["phase"]), None)
        assert json.loads(json.dumps(encode(record))) == known(facts)
        assert record.phases[record.phase] == value["time"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_journal_is_written_in_the_recorded_format(tmp_path, name):
    """An older release reads it: lines have the same names and types, and omit unknown facts."""
    lines = [json.loads(line) for line in recorded(name)]
    times = iter([line["time"] for line in lines])
    journal = Journal(tmp_path, clock=lambda: next(times)).of_job(JOB)
    for line in lines:
        journal.write(Phase(line["phase"]), decode(line["facts"]))
    written = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert written == [line | {"facts": known(line["facts"])} for line in lines]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_recorded_journal_is_evaluated_as_when_it_was_written(tmp_path, name):
    """Ledger entry, mail and note are the same."""
    record, expected, mails = journal_of(tmp_path, b"".join(recorded(name))).record, EXPECTED[name], []
    mailer = SimpleNamespace(deliver=mails.append)
    OwnerMails("c1", mailer, lambda: LATER).send(record, "suspended", why="idle 15m")
    assert (record.phase.value, record.phases) == (expected["phase"], expected["phases"])
    assert known(asdict(record.ledger_entry("c1"))) == expected["ledger"]
    assert [known(asdict(mail)) for mail in mails] == [expected["mail"]] * (expected["mail"] is not None)
    if expected["note"] is not None:
        note = asdict(record.note("c1", LATER))
        assert {name: note.pop(name) for name in LATER_FACTS} == LATER_FACTS
        assert {key: value for key, value in known(note).items() if key != "revision"} == expected["note"]


@pytest.mark.parametrize("name", IN_PLACE)
def test_recorded_journal_in_place_is_taken_over(tmp_path, name):
    """The next agent knows of the job what the last one knew."""
    sleeper = Sleeper.of(journal_of(tmp_path, b"".join(recorded(name))))
    expected = EXPECTED[name]["sleeper"]
    assert {item: getattr(sleeper.facts, item) for item in OF_A_SLEEPER} == {
        item: expected[item] for item in OF_A_SLEEPER
    }
    assert sleeper.facts.mechanism == expected["how"]
    assert sleeper.announced == expected["told"]
    assert (str(sleeper.facts.option), dict(sleeper.needed_bytes)) == (expected["option"], expected["held"])
    assert (list(sleeper.cuda), sorted(sleeper.stay)) == (expected["cuda"], expected["stay"])
    assert sorted(sleeper.facts.calls) == [tuple(call) for call in expected["calls"]]
    assert json.loads(json.dumps(states_of(sleeper.facts.before))) == expected["before"]


@pytest.mark.parametrize("name", sorted(path.name for path in (DATA / "ledger").iterdir()))
def test_every_fact_of_recorded_ledger_is_read(name):
    for line in (DATA / "ledger" / name).read_text().splitlines():
        entry = ledger.decode(line)
        assert {"version": 1} | known(asdict(entry)) == json.loads(line)
        assert json.loads(ledger.encode(entry)) == json.loads(line)


@pytest.mark.parametrize("name", sorted(path.name for path in (DATA / "notes").iterdir()))
def test_every_fact_of_recorded_note_is_read(tmp_path, name):
    (tmp_path / "asleep").mkdir()
    shutil.copy(DATA / "notes" / name, tmp_path / "asleep" / "alpha.7.json")
    (tmp_path / "asleep" / "alpha.7.json").chmod(0o600)
    (note,) = Notes(tmp_path, Signer(KEY, "c1")).all()
    written = json.loads((DATA / "notes" / name).read_text())
    assert asdict(note) == {field.name: {**LATER_FACTS, **written}[field.name] for field in fields(note)}


def test_every_fact_of_recorded_manifest_is_read():
    data, signature = ((DATA / "image" / f"manifest.{end}").read_bytes() for end in ("json", "hmac"))
    text = manifest.decode(data, signature, KEY)
    assert manifest.encode(text) == data
    assert (text.key, text.node, text.option.window_s, text.gpus[0].held_bytes) == (JOB, "c1", 900, 1 << 20)
