"""Whatever a dump or a restore can refuse is checked before anything is changed, by the same code, or retried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.checkpoint.image import criu_images
from slurm_affinode.checkpoint.interface import RestoreFailed, RestoreInterrupted, may_pass
from slurm_affinode.model.suspension import RefusalCode

from . import refusal_sites
from .refusal_sites import DUMP, PACKAGE, RefusalSite, functions, reached, refusal_codes, sites

ADMISSION = (
    "suspension.suspend:JobSuspender.refusals",
    "suspension.suspend:JobSuspender._admit",
    "suspension.dump:RequeueEnding.of_job",
    "suspension.dump:RequeueEnding.image",
    "suspension.dump:RequeueEnding.begin",
    "checkpoint.inspection:collect",  # JobSuspender(inspect=...)
)
"""Checks that ``status`` and a suspension make before anything is changed."""
IN_DUMP = ("checkpoint.criu.criu:Criu.dump",)
ROWS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))[
    "refusal"
]
RETRIES = {
    "RestoreInterrupted": {"restore"},
    "RestoreFailed": {"request"},
    "restore_failure": {"cause"},
    "return": {"suspension"},
    "kind": {"suspension", "restore", "cause"},
    **{name: {"suspension"} for name in DUMP},
}
"""Error -> the retries that it can have."""


def _name(row: dict[str, Any]) -> str:
    return f"{row['module']}-{row['by']}-{row['text']:.40}"


def _sites_of(row: dict[str, Any]) -> list[RefusalSite]:
    return [site for site in sites() if (site.module, site.by, site.text) == (row["module"], row["by"], row["text"])]


def test_every_refusal_has_its_row() -> None:
    """A new one has to be classified, and a row without a refusal is removed."""
    rows = [(row["module"], row["by"], row["text"]) for row in ROWS]
    assert sorted(set(rows)) == sorted(rows)
    assert {(site.module, site.by, site.text) for site in sites()} == set(rows)


def test_refusals_are_found_in_sources() -> None:
    """The reader of the sources finds as many constructions of the errors as a search for their text."""
    for name in ("RestoreFailed", "RestoreInterrupted", "restore_failure", "DumpFailed"):
        text = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "checkpoint").rglob("*.py"))
        made = len(re.findall(rf"(?<!class )(?<!def )\b{name}\(", text))
        assert sum(site.by == name and site.module.startswith("checkpoint") for site in sites()) == made


@pytest.mark.parametrize("row", [row for row in ROWS if "check" in row], ids=_name)
def test_admission_calls_the_check_of_a_refusal(row: dict[str, Any]) -> None:
    """It is the function that the dump or restore calls, too."""
    assert row["check"] in functions()
    assert row["check"] in reached(ADMISSION)
    assert all(row["check"] in reached((site.function,)) for site in _sites_of(row))


@pytest.mark.parametrize("row", [row for row in ROWS if "checked_by_dump" in row], ids=_name)
def test_dump_calls_the_check_of_its_image(row: dict[str, Any]) -> None:
    assert row["checked_by_dump"] in reached(IN_DUMP)


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_refusal_is_retried_as_its_error_permits(row: dict[str, Any]) -> None:
    """One that is not retried has the reason why it would happen again."""
    assert row["retry"] in RETRIES[row["by"]]
    assert ("why" in row) == (row["retry"] == "request")


def test_retry_of_an_error_is_decided_by_its_class() -> None:
    assert may_pass(RestoreInterrupted("full"))
    assert not may_pass(RestoreFailed("bad size"))


def test_every_code_is_used() -> None:
    """By name, or with the name of a limit of the policy."""
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = {RefusalCode[name].value for name in re.findall(r"RefusalCode\.([A-Z_]+)", text)}
    built = {f"{kind}-{what}" for kind in ("excluded", "limit") for what in ("partition", "account", "user")}
    assert named | built == set(RefusalCode)


@pytest.mark.parametrize(
    "message",
    [criu_image for criu_image in criu_images.table() if criu_image.checks],
    ids=lambda problem: problem.text[:40],
)
def test_check_of_an_error_of_criu_is_reached(message: criu_images.CriuMessage) -> None:
    """Before a dump, by the admission; before a restore, by the dump or the restore itself."""
    if message.operation == "dump":
        assert set(message.checks) <= refusal_codes(reached(ADMISSION))
    else:
        steps = reached((*IN_DUMP, "checkpoint.criu.criu:Criu.restore"))
        assert {f"checkpoint.{check}" for check in message.checks} <= {name.partition(":")[0] for name in steps}


def test_new_refusal_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reading of the sources finds one that has no row."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "suspension").mkdir()
    source = 'def check() -> None:\n    raise RestoreFailed(f"{1}: is new")\n'
    (tmp_path / "checkpoint" / "new.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(refusal_sites, "PACKAGE", tmp_path)
    refusal_sites._modules.cache_clear()
    try:
        assert list(sites()) == [RefusalSite("checkpoint.new", "RestoreFailed", "{}: is new", "checkpoint.new:check")]
    finally:
        refusal_sites._modules.cache_clear()
