"""Exposition text and OpenMetrics: recorded files, escapes, bad lines, truncated files."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.exposition import ExpositionReader, parse_labels
from slurm_affinode.metrics.readers.lines import LineBlock, blocks
from slurm_affinode.metrics.schema import SAMPLES

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Reader = Callable[..., Any]
LINE = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n1"} 5 1793520000000\n'


def test_dcgm_exporter_output_is_read(read: Reader, recorded: Path) -> None:
    """One sample per GPU and scrape: united jobs, blank values missing, total memory computed, short host name."""
    result = read(recorded / "gpu" / "dcgm-exporter.prom")
    assert result.format == "prometheus"
    assert len(result.rows) == 6
    first = result.rows[0]
    assert first == {
        "cluster": "default", "node": "gpu01", "uuid": "GPU-5c7e1b3a-0000-4000-8000-000000000000",
        "pci": "00000000:07:00.0", "index": 0, "mig": None, "mig_profile": None, "model": "NVIDIA A100-SXM4-80GB",
        "time": EIGHT, "util_pct": 97.0, "engine_active": 0.953125, "sm_active": None, "tensor_active": None,
        "dram_active": 0.5, "fb_used_mib": 71000.0, "fb_total_mib": 81559.0,
        "power_w": pytest.approx(312.417, abs=1e-4), "xid": 0, "job": "4242",
    }  # fmt: skip
    assert [row["job"] for row in result.rows] == ["4242"] * 2 + ["4242,4243"] * 2 + [None] * 2
    assert [row["dram_active"] for row in result.rows[4:]] == [None, None]
    assert result.rows[4]["xid"] == 31
    assert result.notes.problem_count == 0
    assert dict(result.notes.unknown) == {"DCGM_FI_DEV_SM_CLOCK": 8}


def test_metric_names_of_dcgm_4_7_are_read(read: Reader, recorded: Path) -> None:
    """Ratios and bytes are converted to the percent and MiB of the schema; the label is ``hostname``."""
    row, _ = read(recorded / "gpu" / "dcgm-exporter-4.9.prom").rows
    assert row["node"] == "gpu02"
    assert (row["util_pct"], row["engine_active"], row["sm_active"]) == (50.0, 0.25, 0.125)
    assert (row["tensor_active"], row["dram_active"], row["xid"]) == (0.0625, 0.03125, 0)
    assert (row["fb_used_mib"], row["fb_total_mib"], row["power_w"]) == (80000.0, 81559.0, 401.5)


def test_gpm_metrics_of_jobstats_exporter_are_ratios(read: Reader, tmp_path: Path) -> None:
    """Instances of a divided GPU have no duty cycle; the other names end in ``percent`` with values up to 1."""
    labels = '{minor_number="3",uuid="MIG-1",name="NVIDIA H100",instance="gpu01:9445"}'
    path = tmp_path / "m.prom"
    path.write_text(
        f"nvidia_gpu_graphics_util_percent{labels} 0.25 1793520000000\n"
        f"nvidia_gpu_sm_util_percent{labels} 0.125 1793520000000\n"
    )
    (row,) = read(path).rows
    assert (row["engine_active"], row["sm_active"], row["util_pct"]) == (0.25, 0.125, None)


@pytest.mark.parametrize(("gpu", "identity"), [("2", (2, None)), ("MIG-5a-0", (None, "MIG-5a-0"))])
def test_metrics_of_slurm_job_exporter_are_read(
    read: Reader, tmp_path: Path, gpu: str, identity: tuple[int | None, str | None]
) -> None:
    """Its utilization may come from NVML, so it is no profiling field; an instance is named by its UUID."""
    labels = f'{{user="ann",account="a",slurmjobid="77",gpu="{gpu}",gpu_type="NVIDIA A100",instance="gpu01:9798"}}'
    values = {"utilization_gpu": 50, "utilization_gpu_memory": 25, "tensor_gpu": 12.5, "memory_usage_gpu": 2**30,
              "memory_total_gpu": 2**35, "power_gpu": 250000}  # fmt: skip
    path = tmp_path / "m.prom"
    path.write_text("".join(f"slurm_job_{name}{labels} {value} 1793520000000\n" for name, value in values.items()))
    (row,) = read(path).rows
    assert row["util_pct"] == 50
    assert (row["sm_active"], row["dram_active"], row["tensor_active"]) == (None, None, None)
    assert (row["fb_used_mib"], row["fb_total_mib"], row["power_w"]) == (1024, 32768, 250)
    assert (row["node"], row["job"], row["model"]) == ("gpu01", "77", "NVIDIA A100")
    assert (row["index"], row["mig"]) == identity


def test_ratio_metric_with_percent_values_is_percent(read: Reader, tmp_path: Path) -> None:
    """DCGM 4.6 exports percent under a name that is a ratio in 4.7; values above 1 show that it is percent."""
    path = tmp_path / "m.prom"
    lines = [
        LINE.replace("GPU_UTIL", "GPU_UTIL_RATIO").replace("} 5 1793520", f"}} {v} 179352{n}")
        for n, v in enumerate((0, 1, 97))
    ]
    path.write_text("".join(lines))
    assert [row["util_pct"] for row in read(path).rows] == [0.0, 1.0, 97.0]


def test_mig_instances_and_their_parent_are_devices(read: Reader, recorded: Path) -> None:
    """Instances have an ID and a profile and no utilization; the parent has the same UUID and no ID."""
    parent, item, two = read(recorded / "gpu" / "dcgm-mig.prom").rows
    assert (parent["mig"], parent["power_w"], parent["util_pct"]) == (None, 150.0, None)
    assert (item["mig"], item["mig_profile"], item["engine_active"], item["job"]) == ("7", "1g.10gb", 0.75, "57")
    assert (two["mig"], two["fb_used_mib"], two["fb_total_mib"]) == ("9", 20000.0, 40000.0)
    assert {row["uuid"] for row in (parent, item, two)} == {"GPU-5c7e1b3a-0000-4000-8000-000000000003"}


@pytest.mark.parametrize(
    "labels",
    [
        'Hostname="localhost",instance="n1:9400"',
        'exported_Hostname="n1",instance="10.0.0.7:9400"',
        'exported_node="n1.example.org",instance="10.0.0.7:9400"',
        'Hostname="n1",exported_Hostname="3f2a9c1b7d4e",instance="10.0.0.7:9400"',
    ],
)
def test_node_comes_from_the_most_reliable_label(read: Reader, tmp_path: Path, labels: str) -> None:
    """Generic host names are ignored; labels of the scrape take precedence over those of the exporter."""
    path = tmp_path / "m.prom"
    path.write_text(f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="GPU-1",{labels}}} 5 1793520000000\n')
    assert [row["node"] for row in read(path).rows] == ["n1"]


def test_openmetrics_text_is_read(read: Reader, recorded: Path) -> None:
    """Covers fractional seconds, an exemplar after the value, and escaped quotes."""
    result = read(recorded / "gpu" / "openmetrics.txt")
    assert result.format == "openmetrics"
    assert [(row["time"], row["util_pct"]) for row in result.rows] == [
        (EIGHT, 12.0),
        (EIGHT + timedelta(seconds=15.5), 13.0),
    ]
    assert result.rows[0]["model"] == 'Tesla "V100"'
    assert result.rows[0]["fb_used_mib"] == 16000.0


@pytest.mark.parametrize(
    "stamp", ["1793520000.5", "1793520000500", "1793520000500000", "1793520000500000000", "1.7935200005e12"]
)
@pytest.mark.parametrize("format", ["prometheus", "openmetrics"])
def test_timestamp_in_any_unit_is_read(read: Reader, tmp_path: Path, stamp: str, format: str) -> None:
    """Seconds, milli-, micro- and nanoseconds are accepted, as in tables."""
    path = tmp_path / "m.prom"
    path.write_text(LINE.replace("1793520000000", stamp) + "# EOF\n")
    result = read(path, format=format)
    assert [row["time"] for row in result.rows] == [EIGHT + timedelta(milliseconds=500)]
    assert not result.notes.problems


@pytest.mark.parametrize("stamp", ["179352000050000000000", "99999999999999", "1e300", "-5", "NaN"])
def test_implausible_timestamp_is_reported(read: Reader, tmp_path: Path, stamp: str) -> None:
    """It is implausible in any unit."""
    path = tmp_path / "m.prom"
    path.write_text(LINE + LINE.replace("1793520000000", stamp))
    result = read(path)
    assert len(result.rows) == 1
    assert [(problem.line, problem.reason.partition(":")[0]) for problem in result.notes.problems] == [
        (2, "has an invalid timestamp")
    ]


def test_compressed_text_is_read(read: Reader, recorded: Path, tmp_path: Path) -> None:
    """Compression (gzip here) is detected by content, not by name."""
    path = tmp_path / "metrics"
    path.write_bytes(gzip.compress((recorded / "gpu" / "dcgm-exporter.prom").read_bytes()))
    assert len(read(path).rows) == 6


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{gpu="0"} 5 1793520000000', "metric name"),
        ("this is garbage", "cannot be read"),
        ('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n1" 5 1793520000000', "cannot be read"),
        ('DCGM_FI_DEV_GPU_UTIL{gpu=0,UUID="GPU-1",Hostname="n1"} 5 1793520000000', "labels"),
        ('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n1"} five 1793520000000', "not a number"),
        ('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n1"} 5 soon', "invalid timestamp"),
        ('DCGM_FI_DEV_GPU_UTIL{Hostname="n1"} 5 1793520000000', "names no GPU"),
        ('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1"} 5 1793520000000', "names no node"),
        ('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",instance="localhost:9400"} 5 1793520000000', "names no node"),
    ],
)
def test_bad_line_is_reported_and_skipped(read: Reader, tmp_path: Path, bad: str, reason: str) -> None:
    """The report gives line number and reason; ``strict`` stops there."""
    path = tmp_path / "m.prom"
    path.write_text(LINE + bad + "\n" + LINE.replace("1793520000000", "1793520030000"))
    result = read(path)
    assert [row["util_pct"] for row in result.rows] == [5.0, 5.0]
    (problem,) = result.notes.problems
    assert problem.line == 2
    assert reason in problem.reason
    with pytest.raises(InputError, match=r"m\.prom:2: "):
        read(path, strict=True)


@pytest.mark.parametrize(
    "value", ["NaN", "+Inf", "2147483632", "2147483647", "140737488355328", "9223372036854775792", "-1"]
)
def test_blank_values_are_missing(read: Reader, tmp_path: Path, value: str) -> None:
    """DCGM exports these in place of missing values."""
    path = tmp_path / "m.prom"
    path.write_text(LINE + LINE.replace("GPU_UTIL", "FB_USED").replace("} 5 ", f"}} {value} "))
    (row,) = read(path).rows
    assert (row["util_pct"], row["fb_used_mib"]) == (5.0, None)


def test_file_with_truncated_last_line_is_rejected(read: Reader, tmp_path: Path) -> None:
    """An unterminated last line that cannot be parsed means truncation, not a bad line."""
    path = tmp_path / "m.prom"
    path.write_text(LINE + LINE[:30])
    with pytest.raises(InputError, match=r"m\.prom:2: is cut off"):
        read(path)
    path.write_text(LINE + LINE.rstrip())
    assert len(read(path).rows) == 1


def test_openmetrics_without_eof_is_rejected(read: Reader, tmp_path: Path) -> None:
    """``# EOF`` ends each exposition; if one has it and the last does not, the file is truncated."""
    path = tmp_path / "m.txt"
    path.write_text(LINE + "# EOF\n" + LINE)
    with pytest.raises(InputError, match="EOF"):
        read(path)
    path.write_text("# TYPE x gauge\n" + LINE)
    with pytest.raises(InputError, match="EOF"):
        read(path, format="openmetrics")
    path.write_text("# UNIT x ratio\n" + LINE)
    with pytest.raises(InputError, match="EOF"):
        read(path)
    assert len(read(path, format="prometheus").rows) == 1


def test_end_of_series_has_no_value_and_no_job(read: Reader, tmp_path: Path) -> None:
    """``promtool tsdb dump`` writes it as NaN, at the time of the first sample of the next job."""
    path = tmp_path / "dump.txt"
    line = LINE.replace('gpu="0"', 'gpu="0",hpc_job="8"', 1)
    path.write_text(line + line.replace("} 5 ", "} NaN ").replace('"8"', '"7"'))
    assert [(row["util_pct"], row["job"]) for row in read(path).rows] == [(5.0, "8")]
    path.write_text(line + line.replace("} 5 ", "} NaN ").replace("000000\n", "030000\n"))
    assert [(row["util_pct"], row["job"]) for row in read(path).rows] == [(5.0, "8"), (None, None)]


@pytest.mark.parametrize("blank", ["NaN", "+Inf", "2147483632", "140737488355328"])
def test_blank_value_does_not_hide_percent(read: Reader, tmp_path: Path, blank: str) -> None:
    """A metric that may be percent or ratio is percent if a measured value is above 1."""
    path = tmp_path / "m.prom"
    line = LINE.replace("GPU_UTIL", "GPU_UTIL_RATIO")
    values = (("1", "000"), ("40", "030"), (blank, "060"))
    path.write_text("".join(line.replace("} 5 1793520000000", f"}} {v} 1793520{s}000") for v, s in values))
    assert [row["util_pct"] for row in read(path).rows] == [1.0, 40.0, None]


def test_scrapes_without_timestamps_need_a_start(read: Reader, tmp_path: Path) -> None:
    """Several scrapes also need an interval; a repeated comment starts a new scrape."""
    bare = LINE.replace(" 1793520000000", "")
    path = tmp_path / "m.prom"
    path.write_text(bare)
    with pytest.raises(InputError, match=r"m\.prom:1: the sample has no timestamp") as caught:
        read(path)
    assert "--start" in str(caught.value.hint)
    assert [row["time"] for row in read(path, start=EIGHT).rows] == [EIGHT]
    path.write_text(("# HELP DCGM_FI_DEV_GPU_UTIL x\n" + bare) * 3)
    with pytest.raises(InputError, match="3 scrapes"):
        read(path, start=EIGHT)
    expected = [EIGHT + timedelta(seconds=15 * n) for n in range(3)]
    assert [row["time"] for row in read(path, start=EIGHT, interval_s=15).rows] == expected
    # Without comments, as after grep; there may be a space before the brace.
    path.write_text((bare + bare.replace("GPU_UTIL{", "FB_USED {")) * 3)
    assert [row["time"] for row in read(path, start=EIGHT, interval_s=15).rows] == expected
    path.write_text(LINE.replace("GPU_UTIL{", "GPU_UTIL {"))
    assert len(read(path).rows) == 1


def test_quoted_metric_name_is_not_json(read: Reader, tmp_path: Path) -> None:
    """Quoted names are not supported; the line is reported, and the file is not mistaken for JSON."""
    path = tmp_path / "m.prom"
    path.write_text('{"gpu.busy",gpu="0"} 5 1793520000000\n' + LINE)
    result = read(path)
    assert (result.format, len(result.rows)) == ("prometheus", 1)
    assert [problem.reason.split(":")[0] for problem in result.notes.problems] == ["is not a sample"]


def test_job_metric_applies_to_following_samples(read: Reader, tmp_path: Path) -> None:
    """The exporter of job IDs may be scraped at other times; 0 means that no job holds the GPU."""
    path = tmp_path / "m.prom"
    labels = '{minor_number="0",uuid="GPU-1",instance="n1:9445"}'
    duty = [f"nvidia_gpu_duty_cycle{labels} 1 {1793520000000 + 30000 * n}\n" for n in range(4)]
    jobs = [f"nvidia_gpu_jobId{labels} {job} {1793520007000 + 30000 * n}\n" for n, job in enumerate((41, 0, 42))]
    path.write_text("".join(duty + jobs))
    assert [row["job"] for row in read(path).rows] == [None, "41", None, "42"]
    path.write_text("".join(duty[:1] + jobs[:1]).replace(" 41 ", " 1e30 "))
    assert [row["job"] for row in read(path).rows] == [None]
    path.write_text("".join(jobs))
    assert [row["job"] for row in read(path).rows] == ["41", "42"]


def test_metric_name_can_be_a_label(read: Reader, tmp_path: Path) -> None:
    """``promtool tsdb dump`` writes it as first or as a later label."""
    path = tmp_path / "dump.txt"
    path.write_text(
        '{__name__="DCGM_FI_DEV_GPU_UTIL", gpu="0", UUID="GPU-1", Hostname="n1"} 5 1793520000000\n'
        '{Hostname="n1", UUID="GPU-1", __name__="DCGM_FI_DEV_FB_USED", gpu="0"} 7 1793520000000\n'
    )
    (row,) = read(path).rows
    assert (row["util_pct"], row["fb_used_mib"]) == (5.0, 7.0)


def test_invalid_utf_8_in_names_is_replaced(read: Reader, tmp_path: Path) -> None:
    """The byte becomes a replacement character."""
    path = tmp_path / "m.prom"
    path.write_bytes(LINE.replace('gpu="0"', 'modelName="A\xff",gpu="0"').encode("latin-1"))
    assert read(path).rows[0]["model"] == "A\ufffd"


def test_cluster_option_overrides_cluster_label(read: Reader, tmp_path: Path) -> None:
    """``--cluster`` overrides the label, the label overrides the configuration."""
    path = tmp_path / "m.prom"
    path.write_text(LINE.replace("{", '{cluster="label",'))
    assert read(path, default_cluster="config").rows[0]["cluster"] == "label"
    assert read(path, cluster="given").rows[0]["cluster"] == "given"


def test_large_file_is_read_in_blocks(read: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end at line ends; a scrape that spans two blocks is one sample."""
    monkeypatch.setattr(
        "slurm_affinode.metrics.readers.lines.blocks.__kwdefaults__", {"chunk": 100, "advance": lambda n: None}
    )
    monkeypatch.setattr("slurm_affinode.metrics.readers.long_form.LongForm.__init__.__defaults__", (3,))
    path = tmp_path / "m.prom"
    path.write_text("".join(
        LINE.replace("1793520000000", str(1793520000000 + n)).replace("GPU_UTIL", name)
        for n in range(20) for name in ("GPU_UTIL", "FB_USED", "FB_FREE")
    ))  # fmt: skip
    rows = read(path).rows
    assert [row["fb_total_mib"] for row in rows] == [10.0] * 20


_name = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)


@given(st.dictionaries(_name, st.text(st.characters(exclude_categories=("Cs",)), max_size=12), max_size=4))
def test_labels_with_any_text_are_parsed(labels: dict[str, str]) -> None:
    """Backslash, quote and line feed are escaped; all other characters are literal."""
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    assert parse_labels(",".join(f'{k}="{v}"' for k, v in escaped.items())) == labels


@given(st.text(max_size=30))
def test_invalid_labels_raise_value_error(text: str) -> None:
    """Any text gives labels or a ``ValueError``."""
    with contextlib.suppress(ValueError):
        assert all(name.isidentifier() for name in parse_labels(text))


_NAMES = st.sampled_from(
    ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_FB_USED", "x", "nvidia_gpu_jobId")
)
_LABELS = st.sampled_from(
    (
        'gpu="0",UUID="GPU-1",Hostname="n1"',
        'gpu="1",UUID="GPU-2",Hostname="n1",hpc_job="7"',
        'Hostname="n1"',
        'gpu="0"',
        "gpu=0",
        "",
    )
)
_VALUES = st.sampled_from(("0", "0.5", "97", "NaN", "+Inf", "-1", "2147483632", "N/A", "five", "1e3", ""))
_STAMPS = st.sampled_from(("1793520000000", "1793520030000", "1793520000", "1793520000.5", "-5", "soon", "1", ""))
_LINES = st.one_of(
    st.builds("{}{{{}}} {} {}".format, _NAMES, _LABELS, _VALUES, _STAMPS),
    st.sampled_from(("", "# EOF", "# HELP x y", "  ", "x y z w", "x", '{__name__="x",gpu="0"} 5 1793520000000')),
)


def _damaged(text: str, damage: str, at: int) -> str:
    place = at % (len(text) + 1)
    return text[:place] + damage + text[place:]


_TEXTS = st.builds(
    lambda lines, end, damage, at: _damaged(end.join(lines), damage, at),
    st.lists(_LINES, max_size=12),
    st.sampled_from(("\n", "\r\n")),
    st.sampled_from(("", "}", '"', "# {", " ", "\xff", "{")),
    st.integers(0, 1000),
)


@settings(max_examples=300, deadline=None)
@given(_TEXTS, st.booleans(), st.sampled_from((1 << 20, 150)))
def test_quick_lines_give_the_same_samples_and_problems(
    tmp_path_factory: pytest.TempPathFactory, text: str, strict: bool, chunk: int
) -> None:
    """Sound samples are read by their beginnings; the outcome is as if every line was examined alone."""
    path = tmp_path_factory.mktemp("text") / "m.prom"
    path.write_text(text, newline="")

    def outcome() -> object:
        notes = ReadingNotes(path.name)
        reader = ExpositionReader(notes, ReadOptions(aliases=aliases.load(), zone=UTC, strict=strict), None)
        try:
            rows = pl.concat([pl.DataFrame(schema=SAMPLES), *reader.read(blocks(path, path.name, chunk=chunk))])
        except InputError as error:
            return str(error), error.hint, notes.problems
        return (
            rows.sort(list(SAMPLES), nulls_last=False).rows(), notes.problems, notes.problem_count,
            list(notes.unknown.items()), notes.decisions,
        )  # fmt: skip

    quick = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpositionReader, "_quick_lines", _without_quick_lines)
        assert outcome() == quick


def _without_quick_lines(reader: ExpositionReader, block: LineBlock) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    lines = {"number": pl.Int64(), "head": pl.Int32(), "value": pl.Float64(), "ms": pl.Int64()}
    return pl.DataFrame(schema=lines), pl.DataFrame(schema={"number": pl.Int64(), "name": pl.String()}), block.lines
