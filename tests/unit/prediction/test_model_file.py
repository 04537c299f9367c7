"""Files of models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.prediction import features, model_file, quantile_model
from slurm_affinode.prediction.evaluation import prepare
from slurm_affinode.prediction.features import TARGETS
from slurm_affinode.prediction.intervals import Factors
from slurm_affinode.prediction.model_file import ModelFile

from .synthetic import submissions


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    monkeypatch.setattr(quantile_model, "available", lambda: False)
    target = model_file.target_model(prepare(submissions(), TARGETS[0], tested=False))
    return ModelFile(features.VERSION, features.NAMES, "2026-11-02T00:00:00Z", "test", 0, 1, (target,))


def test_file_is_read_as_it_was_written(tmp_path: Path, model: ModelFile) -> None:
    model_file.write(tmp_path / "m.json", model)
    assert model_file.read(tmp_path / "m.json") == model
    assert model.targets[0].factors is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "m.json: has version 2 of the format; this release reads 1"),
        ({"features": 7}, "m.json: was trained with version 7 of the features; this release has 1"),
        ({"format": "other"}, "m.json: is not a model of slurm-affinode predict"),
        ({"source": "another"}, "m.json: is damaged: its checksum differs"),
        ({"targets": 1}, "m.json: is damaged"),
    ],
)
def test_other_files_are_rejected_by_name(
    tmp_path: Path, model: ModelFile, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.json"
    model_file.write(path, model)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        model_file.read(path)


def test_keys_of_a_later_release_are_ignored(tmp_path: Path, model: ModelFile) -> None:
    """Report and login nodes may have different releases; the digest covers all keys."""
    path = tmp_path / "m.json"
    model_file.write(path, model)
    document = json.loads(path.read_text())
    document["targets"][0]["later"] = 1
    content = {key: value for key, value in document.items() if key not in ("format", "version", "sha256")}
    content["later"] = [1]
    path.write_text(json.dumps({**document, **content, "sha256": model_file._digest(content)}))
    assert model_file.read(path) == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predictor": "lightgbm"}, "is damaged: run_s has 0 texts of models"),
        ({"models": ("text",)}, "is damaged: run_s has 1 texts of models"),
        ({"factors": Factors(0.1, 1e308)}, "is damaged: run_s has impossible factors"),
    ],
)
def test_contents_that_no_training_gives_are_rejected(
    tmp_path: Path, model: ModelFile, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.json"
    model_file.write(path, replace(model, targets=(replace(model.targets[0], **change),)))
    with pytest.raises(InputError, match=message):
        model_file.read(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"[1]", b'{"format"'])
def test_what_is_no_model_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(InputError, match=r"m\.json: is not a model"):
        model_file.read(tmp_path / "m.json")
    with pytest.raises(InputError, match="no such file"):
        model_file.read(tmp_path / "none.json")
