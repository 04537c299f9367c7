"""Saved responses of Prometheus in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.readers import prometheus_json
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.schema import SAMPLES

Reader = Callable[..., Any]
UUID = "GPU-5c7e1b3a-0000-4000-8000-000000000000"


def test_response_of_jobstats_exporter_is_read(read: Reader, recorded: Path) -> None:
    """The exporter gives bytes, milliwatts, the job ID as a value, and ``instance`` as the node."""
    result = read(recorded / "gpu" / "jobstats.json")
    assert result.format == "prometheus-json"
    node_rows = [row for row in result.rows if row["node"] == "della-i12g1"]
    assert [row["job"] for row in node_rows] == [None, "34792230", "34792230"]
    assert [row["power_w"] for row in node_rows] == [60.5, 250.0, None]
    assert [row["util_pct"] for row in node_rows] == [0.0, 50.0, 100.0]
    assert (node_rows[0]["cluster"], node_rows[0]["fb_used_mib"], node_rows[0]["fb_total_mib"]) == (
        "della",
        1024.0,
        40960.0,
    )
    assert len(result.rows) == 6


def test_responses_one_per_line_are_read(read: Reader, tmp_path: Path) -> None:
    """An instant query has one value per series; bad series are reported."""
    good = {
        "metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "UUID": "GPU-1", "Hostname": "n1"},
        "value": [1793520000, "4"],
    }
    series = [good, {**good, "metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL"}}, {**good, "value": [1, "x"]},
              {**good, "value": 7}, {"metric": {}, "value": [1, "2"]}]  # fmt: skip
    answer = json.dumps({"status": "success", "data": {"resultType": "vector", "result": series}})
    path = tmp_path / "a.json"
    path.write_text(f"{answer}\n{answer}\n")
    result = read(path)
    assert [row["util_pct"] for row in result.rows if row["util_pct"] is not None] == [4.0]
    assert result.notes.problem_count == 6


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"status":"error","error":"bad query"}', "bad query"),
        ('{"a": 1}', "not a response of the Prometheus API"),
        ("[1, 2]", "not a response of the Prometheus API"),
        ('{"status":"success","data":{"resultType":"matr', "cut off"),
    ],
)
def test_json_of_another_kind_is_rejected(read: Reader, tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=what):
        read(path)


def answer(*series: object, **more: object) -> str:
    """Return a response with ``series``."""
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}, **more})


GOOD = {
    "metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "UUID": "GPU-1", "Hostname": "n1"},
    "values": [[1793520000, "4"]],
}


def test_partial_response_is_reported(read: Reader, tmp_path: Path) -> None:
    """Prometheus and Thanos add warnings, VictoriaMetrics sets ``isPartial``. The samples are read."""
    path = tmp_path / "a.json"
    path.write_text(answer(GOOD, warnings=["store a is down"]) + "\n" + answer(GOOD, isPartial=True))
    result = read(path)
    assert len(result.rows) == 1
    assert result.notes.decisions == {"warned: store a is down": 1, "warned: the answer is partial (isPartial)": 1}


def test_response_without_series_is_rejected(read: Reader, tmp_path: Path) -> None:
    """The error does not mention unknown names. Next to a response with series it is ignored."""
    path = tmp_path / "a.json"
    path.write_text(answer())
    with pytest.raises(InputError, match="matched nothing"):
        read(path)
    path.write_text(f"{answer()}\n{answer(GOOD)}\n")
    assert len(read(path).rows) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {**GOOD, "metric": ["a"]},
        {**GOOD, "metric": "a"},
        {**GOOD, "values": 5},
        {"metric": {"__name__": "other"}, "values": 5},
        {**GOOD, "values": [[1793520000, "\ud800"]]},
    ],
)
def test_invalid_series_is_reported(read: Reader, tmp_path: Path, bad: object) -> None:
    """The other series are read."""
    path = tmp_path / "a.json"
    path.write_text(answer(bad, GOOD))
    result = read(path)
    assert [row["util_pct"] for row in result.rows] == [4.0]
    assert result.notes.problem_count == 1


def test_null_and_surrogate_labels_are_read(read: Reader, tmp_path: Path) -> None:
    """Null means no label; a lone surrogate is shown as its code."""
    path = tmp_path / "a.json"
    labels = GOOD["metric"]
    assert isinstance(labels, dict)
    path.write_text(answer({**GOOD, "metric": {**labels, "modelName": "A\ud800", "gpu": None}}))
    row = read(path).rows[0]
    assert (row["model"], row["index"]) == ("A\\ud800", None)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, answer(GOOD) + "\n" + "[" * 100_000, answer(GOOD, a=0)[:-2] + "9" * 5000 + "}"]
)
def test_unparsable_json_is_rejected(read: Reader, tmp_path: Path, text: str) -> None:
    """The text has thousands of brackets or digits."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"not a response of the Prometheus API|cut off"):
        read(path)


def _series(metric: str, points: list[Any], **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": metric, "UUID": "GPU-1", "Hostname": "n1", **labels}, "values": points}


SOUND = [
    _series("DCGM_FI_DEV_GPU_UTIL", [[1793520000, "4"], [1793520030.4815, "5"]]),
    _series("DCGM_FI_DEV_GPU_UTIL", [[1793520000, "6"]], UUID="GPU-2", hpc_job="42"),
    _series("somebody_else", [[1793520000, "6"]]),
    _series("gpu_utilization", [[1793520000, "0.5"], [1793520030.0005, "1"]], UUID="GPU-3"),
    _series("gpu_utilization", [[1793520000, "0.5"], [1793520030.0015, "1.5"]], UUID="GPU-4"),
    _series("DCGM_FI_DEV_POWER_USAGE", [[1793520000, "NaN"], [1793520030, "+Inf"], [1793520060, "61"]]),
    {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL"}, "values": [[1793520000, "4"]]},
    _series("DCGM_FI_DEV_GPU_UTIL", []),
    _series("DCGM_FI_DEV_GPU_UTIL", [[1793520000, "9"]]),
]
"""Series whose points are read together; one of them names no device."""


@pytest.mark.parametrize(
    "point",
    [None, [1793520000, "x"], [1793520000, 5], ["1793520000", "5"], [None, "5"], [1e300, "5"], [-1, "5"],
     [10**400, "5"], [True, "5"], [1, "2", "3"], "12", [1, None], [1, "\ud800"]],
)  # fmt: skip
def test_series_read_together_are_those_of_single_series(read: Reader, tmp_path: Path, point: Any) -> None:
    """A point that needs a message has the series converted one by one; samples and notes are the same."""
    bad = [] if point is None else [_series("DCGM_FI_DEV_GPU_UTIL", [point], UUID="GPU-9")]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": SOUND + bad}}))
    together = read(path)
    with mock.patch.object(prometheus_json, "_sound_points", return_value=None) as points:
        alone = read(path)
    assert points.called
    assert together.rows == alone.rows
    assert together.notes == alone.notes


def test_sound_series_are_not_converted_one_by_one(read: Reader, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": SOUND}}))
    with mock.patch.object(prometheus_json, "points_of", side_effect=AssertionError):
        assert len(read(path).rows) == 9


def test_strict_reports_a_bad_series_before_a_later_error(read: Reader, tmp_path: Path) -> None:
    """Series before an unusable response are read first."""
    answer = json.dumps({"data": {"result": [SOUND[6]]}})
    path = tmp_path / "a.json"
    path.write_text(f"{answer}\n[1]\n")
    with pytest.raises(InputError, match="series 1: names no node"):
        read(path, strict=True)


@pytest.mark.parametrize("busy_first", [True, False])
def test_largest_value_of_several_exporters_counts(read: Reader, tmp_path: Path, *, busy_first: bool) -> None:
    """One server may have two exporters of a GPU. The order of series decides nothing; that of names, for the power."""
    busy = [("DCGM_FI_DEV_GPU_UTIL", "0"), ("nvidia_smi_utilization_gpu_ratio", "0.95"), ("DCGM_FI_DEV_FB_USED", "900"),
            ("DCGM_FI_DEV_FB_FREE", "100"), ("nvidia_smi_power_draw_watts", "300")]  # fmt: skip
    idle = [("DCGM_FI_DEV_GPU_UTIL", "0"), ("DCGM_FI_DEV_FB_USED", "0"), ("DCGM_FI_DEV_FB_FREE", "1000"),
            ("nvidia_smi_power_draw_instant_watts", "400")]  # fmt: skip
    rows = [*busy, *idle] if busy_first else [*idle, *busy]
    labels = {"UUID": "GPU-1", "Hostname": "n1"}
    series = [{"metric": {"__name__": name, **labels}, "values": [[1793520000, value]]} for name, value in rows]
    (tmp_path / "a.json").write_text(answer(*series))
    lines = [f'{name}{{UUID="GPU-1",Hostname="n1"}} {value} 1793520000000\n' for name, value in rows]
    (tmp_path / "a.prom").write_text("".join(lines))
    for path in (tmp_path / "a.json", tmp_path / "a.prom"):
        (row,) = read(path).rows
        figures = [row[name] for name in ("util_pct", "fb_used_mib", "fb_total_mib", "power_w")]
        assert figures == [95.0, 900.0, 1000.0, 300.0]


_JSON_PIECES = st.sampled_from(
    (
        '"', "[", "]", "{", "}", ",", ":", "\\", "\n", " ", "0", "9", "-", ".", "e", "x", "NaN", "null", "é", "]]",
        "\x00", "-Infinity", '"values":[[', "\u2028",
    )
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_points_as_columns_give_the_same_samples_and_problems(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Damage at any place: the outcome is that of decoding everything with ``json``."""
    names = data.draw(
        st.lists(st.sampled_from(("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", "x")), max_size=3)
    )
    series = [
        {
            "metric": {"__name__": name, "gpu": "0", "UUID": f"GPU-{at}", "Hostname": "n1"},
            "values": [[1793520000 + 30 * n, str(n)] for n in range(at + 1)],
        }
        for at, name in enumerate(names)
    ]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": series}}
    text = json.dumps(answer, separators=(",", ":")) * data.draw(st.integers(1, 2))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(_JSON_PIECES) + text[at + data.draw(st.integers(0, 2)) :]
    path = tmp_path_factory.mktemp("json") / "m.json"
    path.write_text(text)

    def outcome() -> object:
        notes = ReadingNotes(path.name)
        options = ReadOptions(aliases=aliases.load(), zone=UTC)
        try:
            rows = pl.concat([pl.DataFrame(schema=SAMPLES), *prometheus_json.read(path, notes, options, None)])
        except InputError as error:
            return str(error), error.hint, notes.problems
        return rows.rows(), notes.problems, notes.problem_count, notes.unknown, notes.decisions

    quick = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus_json, "decoded", lambda text: None)
        assert outcome() == quick
