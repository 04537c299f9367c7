"""Ledger lines become one row per suspension, in any order and however often they are ingested."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest

from slurm_affinode.db.repository import Repository
from slurm_affinode.model.ledger import LedgerEntry, decode, encode

KEY = {"cluster": "alpha", "job_id": 7, "submit": 1000, "began_ms": 1_000_000}
LINES = (
    LedgerEntry(**KEY, seq=1, user="al\u00efce", gpus=2, node="c1"),
    LedgerEntry(**KEY, queued_ms=1_060_000, image_bytes=5),
    LedgerEntry(**KEY, restoring_ms=4_660_000, restored_ms=4_661_000, restored_node="c2"),
)


def at(seconds):
    return datetime.fromtimestamp(seconds, UTC)


@pytest.fixture
def store(store_url):
    with Repository.open(store_url) as repository:
        yield repository


def test_order_of_lines_does_not_matter(store):
    """Each fact is recorded once; known facts change nothing."""
    store.upsert_suspensions(LINES)
    [whole] = store.suspensions(at(0), at(9999))
    for order in itertools.permutations(LINES):
        assert store.upsert_suspensions(order).unchanged == 3
    assert whole.restored_node == "c2"
    assert whole.user == "al\u00efce"
    assert whole.seq == 1


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [(0, 500, False), (0, 1001, True), (2000, 3000, True), (4661, 9999, False), (4660, 9999, True)],
)
def test_suspensions_that_overlap_an_interval_are_found(store, since, until, expected):
    store.upsert_suspensions(LINES)
    assert bool(store.suspensions(at(since), at(until))) is expected


def test_suspended_job_is_in_every_later_interval_and_is_not_deleted(store):
    store.upsert_suspensions(LINES[:2])
    assert store.suspensions(at(10**6), at(10**6 + 1))
    store.delete_before(at(10**6))
    assert store.suspensions(at(10**6), at(10**6 + 1))
    store.upsert_suspensions(LINES[2:])
    store.delete_before(at(10**6))
    assert store.suspensions(at(0), at(10**6)) == []


def test_fingerprint_changes_with_a_suspension(store):
    before = store.fingerprint(at(0), at(9999))
    store.upsert_suspensions(LINES[:2])
    asleep = store.fingerprint(at(0), at(9999))
    store.upsert_suspensions(LINES[:2])
    assert store.fingerprint(at(0), at(9999)) == asleep != before


def test_line_round_trip():
    for entry in LINES:
        assert decode(encode(entry)) == entry


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ('{"version":2}', "not of version 1"),
        ('{"version":1,"cluster":"a","job_id":1,"submit":1}', "began_ms is missing"),
        ('{"version":1,"cluster":"a","job_id":-1,"submit":1,"began_ms":1}', "job_id is not a whole number"),
        ('{"version":1,"cluster":"a","job_id":true,"submit":1,"began_ms":1}', "job_id is not a whole number"),
        ('{"version":1,"cluster":5,"job_id":1,"submit":1,"began_ms":1}', "cluster is not a text"),
    ],
)
def test_invalid_line_is_reported(line, message):
    with pytest.raises(ValueError, match=message):
        decode(line)
