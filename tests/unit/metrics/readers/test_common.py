"""Node names, device identifiers, job IDs and file formats, as shared by all readers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.identity import node_name, pci_address
from slurm_affinode.metrics.readers import local_time
from slurm_affinode.metrics.readers.common import Identifier, ReadOptions, job_ids
from slurm_affinode.metrics.readers.inputs import detect, node_from_path

OPTIONS = ReadOptions(aliases=aliases.load(), default_cluster="alpha")


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("gpu01", "gpu01"), ("gpu01.example.org", "gpu01"), ("gpu01.example.org:9400", "gpu01"),
        ("http://gpu01:9400/metrics", "gpu01"), ("10.1.2.3:9400", "10.1.2.3"), ("[fe80::1]:9400", "fe80::1"),
        ("fe80::1", "fe80::1"), ("  ", None),
    ],
)  # fmt: skip
def test_node_name_is_the_short_host_name(text: str, node: str | None) -> None:
    """IP addresses are kept."""
    assert node_name(text) == node


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:e1:00.0", "00000000:E1:00.0"), ("00000000:07:00.0", "00000000:07:00.0"), ("7:0", "00000000:07:00.0"),
        ("e1:00.0", "00000000:E1:00.0"), ("nvidia0", None), ("", None),
    ],
)  # fmt: skip
def test_pci_address_is_normalized(text: str, address: str | None) -> None:
    """The form is in upper case with a domain of eight digits."""
    assert pci_address(text) == address


@pytest.mark.parametrize(
    ("path", "node"),
    [
        ("gpu01.csv", "gpu01"), ("/logs/gpu-01.csv.gz", "gpu-01"), ("nvidia-smi_gpu01_2026-11-01.log", "gpu01"),
        ("nvidia-smi-gpu-01-20261101T080000Z.csv", "gpu-01"), ("dmon-dgx-a100-07.txt", "dgx-a100-07"),
        ("/x/node7/dmon.txt", "node7"), ("/x/node7.example.org/metrics", "node7"), ("gpu01_gpu0.csv", "gpu01"),
        ("a1_b2.csv", None), ("samples.csv", None), ("/data/week45/samples.csv", None), ("2026-11-01.csv", None),
        ("/history_2026-11/part0001.csv", None), ("/x/trace_of_n01/samples.csv", None), ("", None),
        ("gpu06/smi1.csv", "gpu06"), ("gpu06/nvidia-smi2.log", "gpu06"), ("/logs/dmon3.txt", None),
        ("host3.csv", "host3"),
    ],
)  # fmt: skip
def test_node_is_derived_from_unambiguous_paths_only(path: str, node: str | None) -> None:
    """An error is better than a wrong node."""
    assert node_from_path(path) == node


@pytest.mark.parametrize(
    ("raw", "marks"),
    [
        ({"uuid": "GPU-AB", "index": "3"}, ("GPU-ab", None, 3, None)),
        (
            {"uuid": "df6e7a7c-7314-46f8-abc4-b88b36dcf3aa"},
            ("GPU-df6e7a7c-7314-46f8-abc4-b88b36dcf3aa", None, None, None),
        ),
        ({"uuid": "MIG-1"}, (None, None, None, "MIG-1")),
        ({"index": "GPU-ab"}, ("GPU-ab", None, None, None)),
        ({"index": "00000000:07:00.0"}, (None, "00000000:07:00.0", None, None)),
        ({"index": "nvidia4", "mig": "7"}, (None, None, 4, "7")),
        ({"index": "18406264533268036793", "uuid": "5"}, (None, None, 5, None)),
        ({"uuid": "card-x"}, ("card-x", None, None, None)),
        ({"index": "1.0", "mig": "7.0"}, (None, None, 1, "7")),
        ({"uuid": "0.0", "mig": "0.0"}, (None, None, 0, "0")),
        ({"uuid": "1e400"}, ("1e400", None, None, None)),
        ({"uuid": "²"}, ("²", None, None, None)),
        ({"uuid": "9" * 256, "index": "2"}, (None, None, 2, None)),
    ],
)
def test_device_identifiers_are_recognized_by_form(raw: dict[str, str], marks: tuple[object, ...]) -> None:
    """This also applies if a column or label holds another identifier than its name suggests."""
    identity = Identifier(OPTIONS, "n1").identify(raw)
    assert identity == ("alpha", "n1", *marks, None, None)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("7", "7"),
        ("9, 7;7", "7,9"),
        ("4.2e+07", "42000000"),
        ("0", None),
        ("0.0", None),
        ("", None),
        ("N/A", None),
        ("12_3", "12_3"),
        ("1e400", "1e400"),
    ],
)
def test_job_ids_are_normalized(text: str, ids: str | None) -> None:
    """They are sorted, unique whole numbers; 0 and empty mean no job."""
    assert job_ids(text) == ids


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"), (b"\n \n", "is empty"), (b"\x7fELF\x00\x00", "binary file"),
        ("a".encode("utf-16"), "no known format"), (b"dear diary\nnothing\n", "no known format"),
        (b"a,b\n1,2\n", "no known format"), (b"\x1f\x8b\x08\x00 not gzip", "cut off or damaged"),
        (b"#Date  Time  gpu pwr sm\n#YYYYMMDD HH:MM:SS Idx W %\n 20261101 01:00:00 0 66 5\n", "in a form that is not"),
        (b"# gpu   pwr\n# Idx     W\n    0    66\n", "in a form that is not"),
    ],
)  # fmt: skip
def test_file_of_unknown_format_is_rejected(tmp_path: Path, content: bytes, what: str) -> None:
    """The error names the file and its content."""
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(InputError, match=what) as caught:
        detect(path, "x", OPTIONS.aliases)
    assert str(caught.value).startswith(("x: ", str(path)))
    assert "\n" not in str(caught.value)


def test_format_is_detected_by_content(recorded: Path) -> None:
    """The file names do not matter."""
    detections = {
        path.name: detect(path, path.name, OPTIONS.aliases) for path in sorted((recorded / "gpu").glob("*.[pctjx]*"))
    }
    assert detections == {
        "dcgm-exporter-4.9.prom": "prometheus", "dcgm-exporter.prom": "prometheus", "dcgm-mig.prom": "prometheus",
        "dmon.txt": "dmon", "jobstats.json": "prometheus-json", "long.csv": "csv", "nounits-noheader.csv": "nvidia-smi",
        "nvidia-smi-gpu01.csv": "nvidia-smi", "nvidia-smi-535.xml": "nvidia-smi-xml",
        "nvidia-smi-q-550.txt": "nvidia-smi-q", "nvidia-smi-table-390.txt": "nvidia-smi-table",
        "nvidia-smi-table-525.txt": "nvidia-smi-table", "nvidia-smi-table-580-mig.txt": "nvidia-smi-table",
        "openmetrics.txt": "openmetrics", "wide.csv": "csv",
    }  # fmt: skip


def test_local_zone_comes_from_tz_or_etc_localtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without either, Python's local time is used."""
    monkeypatch.setenv("TZ", "Europe/Oslo")
    assert str(local_time.local_zone()) == "Europe/Oslo"
    monkeypatch.delenv("TZ")
    link = tmp_path / "localtime"
    link.symlink_to("/usr/share/zoneinfo/UTC")
    assert str(local_time.local_zone(link)).endswith("UTC")
    assert local_time.local_zone(tmp_path / "none") is None
    monkeypatch.setenv("TZ", "Nowhere/Land")
    assert local_time.local_zone() is None
    naive = pl.Series([datetime(2026, 11, 1, 8), None])  # noqa: DTZ001 - a local time
    times, decisions = local_time.localise(naive, UTC)
    assert times.to_list() == [datetime(2026, 11, 1, 8, tzinfo=UTC), None]
    assert decisions == {}


def test_unreadable_file_is_rejected(read: Callable[..., Any], tmp_path: Path) -> None:
    """Covers a directory, a missing file, text that ends in NUL bytes, truncated gzip, and an unknown format."""
    with pytest.raises(InputError, match="is a directory"):
        read(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "none")
    path = tmp_path / "m.prom"
    line = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 5 1793520000000\n'
    path.write_bytes(line.encode() * 2000 + b"\0\n" * 2000)
    with pytest.raises(InputError, match=r"m\.prom:3001: is a binary file"):
        read(path)
    path.write_bytes(gzip.compress(line.encode() * 9999)[:-20])
    with pytest.raises(InputError, match="cut off or damaged"):
        read(path)
    with pytest.raises(InputError, match="not a format"):
        read(path, format="runes")


TEXTS = {
    "prometheus": 'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{uuid}",Hostname="n1"}} {value} 17935200{at}000\n',
    "csv": "17935200{at},n1,{uuid},{value}\n",
    "nvidia-smi": "2026/11/01 08:{at}:00.000, {uuid}, {value} %\n",
    "dmon": "2026-11-01T08:{at}:00+0000 GPU 0  {value}.0\n",
}
HEADS = {"prometheus": "# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n", "csv": "time,node,uuid,util_pct\n",
         "nvidia-smi": "timestamp, uuid, utilization.gpu [%]\n", "dmon": "#Entity   GPUTL\n"}  # fmt: skip


def written(kind: str, *bad: str, count: int = 3) -> str:
    """Return a file with samples 0, 1, 2; ``bad`` lines follow the first sample."""
    good = [TEXTS[kind].format(uuid="GPU-1", value=at, at=f"{at:02d}") for at in range(count)]
    return "".join((HEADS[kind], good[0], *bad, *good[1:]))


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_any_line_end_and_encoding_is_read(
    read: Callable[..., Any], tmp_path: Path, kind: str, end: str, encoding: str
) -> None:
    """This includes single carriage returns, compression and UTF-16, for every text format."""
    path = tmp_path / "m.gz"
    path.write_bytes(gzip.compress(written(kind).replace("\n", end).encode(encoding)))
    result = read(path, node="n1")
    assert (result.format, [row["util_pct"] for row in result.rows]) == (kind, [0.0, 1.0, 2.0])
    assert not result.notes.problems


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize(
    ("bad", "why"),
    [("9\0 9\n", "holds a NUL byte in column 2"), ("x" * 200_000 + "\n", "is longer than 128 KiB")],
)
def test_damaged_line_is_reported_and_rest_is_read(
    read: Callable[..., Any], tmp_path: Path, kind: str, bad: str, why: str
) -> None:
    """The report gives the line number; ``strict`` stops there."""
    path = tmp_path / "m"
    path.write_text(written(kind, bad))
    result = read(path, node="n1")
    assert (result.format, [row["util_pct"] for row in result.rows]) == (kind, [0.0, 1.0, 2.0])
    assert [(problem.line, problem.reason.partition(":")[0]) for problem in result.notes.problems] == [(3, why)]
    with pytest.raises(InputError, match=r"m:3: "):
        read(path, node="n1", strict=True)


@pytest.mark.parametrize("kind", ["prometheus", "csv", "nvidia-smi"])
def test_too_long_label_is_reported(read: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    """The report gives line and name; nothing of the sample is stored."""
    path = tmp_path / "m"
    path.write_text(written(kind, TEXTS[kind].format(uuid="GPU-" + "a" * 9000, value=5, at="03")))
    result = read(path, node="n1")
    assert [row["util_pct"] for row in result.rows] == [0.0, 1.0, 2.0]
    (problem,) = result.notes.problems
    assert problem.line == 3
    assert problem.reason.startswith("uuid has 9,004 bytes, at most 256 fit")


@pytest.mark.parametrize(
    ("name", "size", "reason"), [("model", 2000, "model has 2,000"), ("hpc_job", 5000, "job has 5,000")]
)
def test_too_long_label_of_a_response_is_reported(
    read: Callable[..., Any], tmp_path: Path, name: str, size: int, reason: str
) -> None:
    """The other series are read."""
    labels = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "0", "Hostname": "n1"}
    series = [
        {"metric": item, "values": [[1793520000, "1"]]} for item in (labels, labels | {"gpu": "1", name: "7" * size})
    ]
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}}))
    result = read(path)
    assert [row["index"] for row in result.rows] == [0]
    assert result.notes.problems[0].reason.startswith(f"series 2: {reason} bytes")
