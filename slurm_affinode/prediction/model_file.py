"""File of a model: JSON with the predictor of each target, its factors, and LightGBM's text where a model is used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.base import json_values
from slurm_affinode.base.errors import InputError, unwritable
from slurm_affinode.base.files import delivering
from slurm_affinode.prediction import features
from slurm_affinode.prediction.evaluation import MODEL, PreparedTarget
from slurm_affinode.prediction.features import LEVELS, NAMES, TARGETS
from slurm_affinode.prediction.intervals import Factors, last_factors

FORMAT = "slurm-affinode prediction"
VERSION = 1
_LARGEST = 256 * 2**20
_WIDEST = 100.0
"""Largest logarithm of a factor: real ones are below that of the range of run times."""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The predictor of one target."""

    target: str
    predictor: str
    reason: str
    jobs: int
    """Jobs with a known value."""
    losses: Mapping[str, float]
    """Predictor -> mean pinball loss of the median on the jobs of the selection."""
    factors: Factors | None
    """``None``: too few jobs for an interval."""
    models: tuple[str, ...]
    """Texts of LightGBM, one per quantile; empty: a baseline is used."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The contents of a file."""

    features: int
    """Version of the features."""
    names: tuple[str, ...]
    created: str
    """UTC, ISO 8601."""
    source: str
    first_s: int
    """First and last submission, in seconds of the source."""
    last_s: int
    targets: tuple[TargetModel, ...]


def target_model(prepared: PreparedTarget) -> TargetModel:
    """Return what is used for a target, with the factors after its last job."""
    choice, table = prepared.choice, prepared.table
    learned = choice.predictor == MODEL
    factors = last_factors(table, prepared.predictions[choice.predictor], prepared.fitted if learned else 0)
    actual_count = int((table.actual == table.actual).sum())  # NaN differs from itself
    return TargetModel(
        table.target.name, choice.predictor, choice.reason, actual_count, dict(choice.losses), factors,
        prepared.models if learned else (),
    )  # fmt: skip


def write(path: Path, model: ModelFile) -> None:
    """Write a file, atomically. Raises ``AffinodeError`` if that fails."""
    content = dataclasses.asdict(model)
    document = {"format": FORMAT, "version": VERSION, "sha256": _digest(content), **content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with delivering(path) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error


def read(path: Path) -> ModelFile:
    """Read a file. Raises ``InputError`` for one that is damaged, of another version, or with other features."""
    where = str(path)
    again = "train it again: slurm-affinode predict train"
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError("is too large for a model", where=where, hint=again)
        document = json_values.table(json_values.loads(path.read_bytes()))
    except FileNotFoundError:
        raise InputError("no such file", where=where, hint=again) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=where) from error
    except ValueError:
        raise InputError("is not a model: not a JSON object", where=where, hint=again) from None
    if document.pop("format", None) != FORMAT:
        raise InputError("is not a model of slurm-affinode predict", where=where, hint=again)
    version = document.pop("version", None)
    if version != VERSION:
        raise InputError(f"has version {version!r:.20} of the format; this release reads {VERSION}", where=where,
                         hint=again)  # fmt: skip
    if document.get("features") != features.VERSION:
        raise InputError(
            f"was trained with version {document.get('features')!r:.20} of the features; this release has "
            f"{features.VERSION}", where=where, hint=again,
        )  # fmt: skip
    digest = document.pop("sha256", None)
    if digest != _digest(document):
        raise InputError("is damaged: its checksum differs", where=where, hint=again)
    try:
        model = json_values.record(ModelFile, document, strict=False)
    except ValueError as error:
        raise InputError(f"is damaged: {error}", where=where, hint=again) from error
    if model.names != NAMES or not {target.target for target in model.targets} <= {target.name for target in TARGETS}:
        raise InputError("was trained with other features than this release has", where=where, hint=again)
    for entry in model.targets:
        if len(entry.models) != (len(LEVELS) if entry.predictor == MODEL else 0):
            raise InputError(
                f"is damaged: {entry.target} has {len(entry.models)} texts of models", where=where, hint=again
            )
        if entry.factors is not None and not all(abs(value) <= _WIDEST for value in dataclasses.astuple(entry.factors)):
            raise InputError(f"is damaged: {entry.target} has impossible factors", where=where, hint=again)
    return model


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
