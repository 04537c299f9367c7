"""Snapshots of nvidia-smi in any layout: values, identity, times, processes, truncation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers import snapshots

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Reader = Callable[..., Any]
A100 = "NVIDIA A100-SXM4-80GB"


def test_two_line_table_is_read(read: Reader, recorded: Path) -> None:
    """Driver 390: the time is the line above the table, and a name that was cut off is not a model."""
    result = read(recorded / "gpu" / "nvidia-smi-table-390.txt", node="gpu01", strict=True)
    assert result.format == "nvidia-smi-table"
    assert [
        (
            row["index"],
            row["pci"],
            row["model"],
            row["util_pct"],
            row["fb_used_mib"],
            row["power_w"],
        )
        for row in result.rows
    ] == [
        (0, "00000000:02:00.0", None, 0.0, 30449.0, 49.0),
        (1, "00000000:82:00.0", "Tesla M40 24GB", 78.0, 558.0, 113.0),
    ]
    assert {row["time"] for row in result.rows} == {datetime(2018, 6, 8, 7, 42, 8, tzinfo=UTC)}
    assert not result.notes.unknown


def test_err_and_na_are_missing_values(read: Reader, recorded: Path) -> None:
    """A GPU that has failed has a sample without a utilization, never one at 0 %."""
    failed, idle = read(recorded / "gpu" / "nvidia-smi-table-525.txt", node="gpu01").rows
    assert (failed["util_pct"], failed["power_w"], failed["model"]) == (None, None, None)
    assert (idle["util_pct"], idle["fb_used_mib"]) == (0.0, 45123.0)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("nvidia-smi-table-390.txt", 1),
        ("nvidia-smi-table-525.txt", 1),
        ("nvidia-smi-table-580-mig.txt", None),
        ("nvidia-smi-q-550.txt", 1),
        ("nvidia-smi-535.xml", 1),
    ],
)
def test_memory_held_at_zero_percent_is_reported(read: Reader, recorded: Path, name: str, held: int | None) -> None:
    """A compute process that holds memory of a GPU at 0 % counts; a MIG instance has no utilization."""
    notes = read(recorded / "gpu" / name, node="gpu01").notes
    assert notes.decisions.get(snapshots.HELD) == held


def test_mig_instances_of_the_table_are_devices(read: Reader, recorded: Path) -> None:
    """Compute instances share the memory of their GPU instance, which is one device."""
    rows = read(recorded / "gpu" / "nvidia-smi-table-580-mig.txt", node="gpu01", strict=True).rows
    values = {
        (row["index"], row["mig"]): (row["pci"], row["model"], row["util_pct"], row["fb_used_mib"]) for row in rows
    }
    assert values == {
        (0, None): ("00000000:4F:00.0", A100, None, 9876.0),
        (0, "1"): ("00000000:4F:00.0", A100, None, 9826.0),
        (0, "5"): ("00000000:4F:00.0", A100, None, 25.0),
        (1, None): ("00000000:52:00.0", A100, 0.0, 4.0),
    }


@pytest.mark.parametrize("name", ["nvidia-smi-q-550.txt", "nvidia-smi-535.xml"])
def test_query_output_is_read_as_text_and_xml(read: Reader, recorded: Path, name: str) -> None:
    """Memory is that of the framebuffer, power that of the GPU; an instance has the UUID of its GPU."""
    result = read(recorded / "gpu" / name, node="gpu01", strict=True)
    assert [
        (row["uuid"][-1], row["mig"], row["util_pct"], row["fb_used_mib"], row["fb_total_mib"], row["power_w"])
        for row in result.rows
    ] == [
        ("0", None, None, 9876.0, 81920.0, pytest.approx(178.44)),
        ("0", "1", None, 9826.0, 40192.0, None),
        ("1", None, 0.0, 70123.0, 81920.0, pytest.approx(62.1)),
    ]
    assert {row["time"] for row in result.rows} == {EIGHT}
    assert {row["model"] for row in result.rows} == {A100}


def shifted(text: str, minutes: int) -> str:
    return text.replace("08:00:00", f"08:{minutes:02}:00")


@pytest.mark.parametrize("name", ["nvidia-smi-table-580-mig.txt", "nvidia-smi-q-550.txt", "nvidia-smi-535.xml"])
def test_log_of_many_snapshots_is_read(read: Reader, recorded: Path, tmp_path: Path, name: str) -> None:
    """Each snapshot has its own time; the last one may still be being written."""
    whole = (recorded / "gpu" / name).read_text()
    path = tmp_path / "gpu01.log"
    path.write_text("".join(shifted(whole, at) for at in range(3)) + shifted(whole, 3)[: len(whole) // 4])
    result = read(path)
    rows = [row for row in result.rows if row["pci"] == "00000000:52:00.0"]
    assert [row["time"] for row in rows] == [EIGHT + timedelta(minutes=at) for at in range(3)]
    assert {row["node"] for row in rows} == {"gpu01"}
    (problem,) = result.notes.problems
    assert problem.reason.startswith("the snapshot is cut off, or still being written")
    with pytest.raises(InputError, match=rf"gpu01\.log:{problem.line}: "):
        read(path, strict=True)


@pytest.mark.parametrize(
    "name", ["nvidia-smi-table-390.txt", "nvidia-smi-table-580-mig.txt", "nvidia-smi-q-550.txt", "nvidia-smi-535.xml"]
)
@pytest.mark.parametrize("share", [0.2, 0.25, 0.3, 0.35, 0.4])
def test_truncated_file_is_rejected_or_its_values_are_true(
    read: Reader, recorded: Path, tmp_path: Path, name: str, share: float
) -> None:
    """No value of a truncated output differs from the whole one."""
    whole = (recorded / "gpu" / name).read_text()
    path = tmp_path / "gpu01.txt"
    path.write_text(whole[: int(len(whole) * share)])
    try:
        rows = read(path).rows
    except InputError as error:
        rows, refusal = [], str(error)
    else:
        refusal = "gpu01.txt: is cut off" if not rows else ""
    assert rows or refusal.startswith("gpu01.txt")
    assert rows or "cut off" in refusal
    complete = [dict(row, node="gpu01") for row in read(recorded / "gpu" / name, node="gpu01").rows]
    assert all(row in complete for row in rows)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("Bus-Id        Disp.A", "Slot          Disp.A"), 5),
        (("| N/A   37C    P0    49W / 300W ", "| hot    ;   300W "), 9),
        (("| Fan  Temp  Perf  Pwr:Usage/Cap", "| Fan  Temp  Pwr:Usage/Cap"), 6),
    ],
)
def test_unknown_layout_of_the_table_is_rejected_by_line(
    read: Reader, recorded: Path, tmp_path: Path, change: tuple[str, str], line: int
) -> None:
    """The message has the release, which decides the layout."""
    path = tmp_path / "gpu01.txt"
    path.write_text((recorded / "gpu" / "nvidia-smi-table-390.txt").read_text().replace(*change))
    with pytest.raises(InputError, match=rf"gpu01\.txt:{line}: is a table of nvidia-smi 390\.48 in a layout"):
        read(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("v12.dtd", "v99.dtd"), r"x\.xml:2: has a format .* not known: nvsmi_device_v99\.dtd"),
        (("<uuid>", "<uid>"), r"x\.xml:\d+: is not the XML of nvidia-smi: mismatched tag"),
        (('"nvsmi_device_v12.dtd">', '"nvsmi_device_v12.dtd" [<!ENTITY a "b">]>'), r"x\.xml:2: declares an entity"),
    ],
)
def test_unknown_xml_is_rejected(
    read: Reader, recorded: Path, tmp_path: Path, change: tuple[str, str], why: str
) -> None:
    """Unknown versions, damaged documents, and entities, which could expand without end."""
    path = tmp_path / "x.xml"
    path.write_text((recorded / "gpu" / "nvidia-smi-535.xml").read_text().replace(*change))
    with pytest.raises(InputError, match=why):
        read(path, node="gpu01")


def without_time(recorded: Path, name: str) -> str:
    lines = (recorded / "gpu" / name).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if "2018" not in line and "Nov  1" not in line)


@pytest.mark.parametrize("name", ["nvidia-smi-table-390.txt", "nvidia-smi-q-550.txt", "nvidia-smi-535.xml"])
def test_time_comes_from_file_name_or_option(read: Reader, recorded: Path, tmp_path: Path, name: str) -> None:
    """Without either, the refusal names the options."""
    text = without_time(recorded, name)
    path = tmp_path / "gpu01.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=r"gpu01\.txt: the snapshots have no times") as refusal:
        read(path)
    assert "--start TIME" in str(refusal.value.hint)
    assert {row["time"] for row in read(path, start=EIGHT).rows} == {EIGHT}
    named = path.rename(tmp_path / "gpu01_2026-11-01T0900.txt")
    result = read(named, zone="Europe/Oslo")
    assert {row["time"] for row in result.rows} == {EIGHT}
    assert "time taken from the name of the file: 2026-11-01 09:00:00" in result.notes.decisions
    named.write_text(text * 2)
    with pytest.raises(InputError, match="has several samples of a device and no times"):
        read(named)
    assert {row["time"] for row in read(named, interval_s=60).rows} == {
        EIGHT + timedelta(hours=1, minutes=at) for at in range(2)
    }


def test_snapshot_without_time_among_others_is_reported(read: Reader, recorded: Path, tmp_path: Path) -> None:
    """It is left out: its time is unknown."""
    path = tmp_path / "gpu01.txt"
    name = "nvidia-smi-table-390.txt"
    path.write_text((recorded / "gpu" / name).read_text() + without_time(recorded, name))
    result = read(path)
    assert len(result.rows) == 2
    assert [(problem.line, problem.reason) for problem in result.notes.problems] == [(23, "the snapshot has no time")]


@pytest.mark.parametrize(
    "line",
    [
        "Sun Nov  1 08:00:00 UTC 2026",
        "2026-11-01T08:00:00+00:00",
        "1793520000",
        "Sun Nov  1 09:00:00 CET 2026",
    ],
)
def test_date_line_with_a_zone_precedes_the_time_of_the_table(
    read: Reader, recorded: Path, tmp_path: Path, line: str
) -> None:
    """nvidia-smi writes local times without a zone. An abbreviation such as CET says nothing more."""
    path = tmp_path / "gpu01.txt"
    whole = (recorded / "gpu" / "nvidia-smi-table-390.txt").read_text()
    path.write_text(f"{line}\n{whole.replace('Fri Jun  8 07:42:08 2018', 'Sun Nov  1 09:00:00 2026')}")
    assert {row["time"].hour for row in read(path, zone="Europe/Oslo").rows} == {8}


def test_quoted_snapshot_in_a_mail_is_read(read: Reader, recorded: Path, tmp_path: Path) -> None:
    """Text around it is skipped, and so are the quotation marks."""
    quoted = "".join(f"> {line}\n" for line in (recorded / "gpu" / "nvidia-smi-table-525.txt").read_text().split("\n"))
    path = tmp_path / "gpu01.txt"
    path.write_text(f"Dear all,\nthis GPU is held since Friday:\n\n{quoted}\nbest wishes\n")
    assert [row["util_pct"] for row in read(path).rows] == [None, 0.0]


@pytest.mark.parametrize("name", ["nvidia-smi-table-390.txt", "nvidia-smi-q-550.txt", "nvidia-smi-535.xml"])
def test_number_of_gpus_in_a_snapshot_is_limited(read: Reader, recorded: Path, tmp_path: Path, name: str) -> None:
    """Each process is compared with all GPUs: a hostile file could otherwise take hours."""
    text = (recorded / "gpu" / name).read_text()
    first, last = {
        "table": ("|   0  Tesla", "|   1  Tesla"),
        "q": ("GPU 00000000:4F", "GPU 00000000:52"),
        "xml": ("\t<gpu id", "</nvidia"),
    }["table" if "table" in name else "q" if "-q-" in name else "xml"]
    begin, end = text.index(first), text.index(last)
    path = tmp_path / "gpu01.txt"
    path.write_text(text[:begin] + text[begin:end] * 1100 + text[end:])
    with pytest.raises(InputError, match=r"gpu01\.txt:\d+: has more than 1,024 GPUs in a snapshot"):
        read(path)
