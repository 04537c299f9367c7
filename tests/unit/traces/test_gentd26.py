"""The tables of GenTD26 are read with any column order and compression; errors are one line."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces.gentd26 import read, read_timed_requests

DUTY = "pod_gpu_duty_cycle_anon"
MEMORY = "pod_gpu_memory_used_bytes_anon"
REQUESTS = "data_trace_processed"
REQUEST_HEADER = "predict_type,exec_time_seconds,checkpoint_model_version_id,lora_args\n"


def write(directory: Path, name: str, text: str | bytes) -> Path:
    path = directory / f"{name}.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_columns_can_have_any_order(tmp_path: Path) -> None:
    """Published tables differ in the order of their columns; extra columns are ignored."""
    write(tmp_path, DUTY, "value,timestamp_anon,container_ip\n5.0,100.0,pod\n")
    write(tmp_path, MEMORY, "container_ip,extra,timestamp_anon,value\npod,x,100.0,2e9\n")
    trace = read([tmp_path])
    assert trace.metrics["gpu_duty_cycle"].rows() == [(100.0, "pod", 5.0)]
    assert trace.metrics["gpu_memory"].rows() == [(100.0, "pod", 2e9)]


def test_archive_and_its_extracted_file_are_one_table(tmp_path: Path) -> None:
    """Equal copies of a table count once; two versions of a table that differ are an error."""
    text = "timestamp_anon,value,container_ip\n1.0,0.0,p\n"
    write(tmp_path, DUTY, text)
    with tarfile.open(tmp_path / f"{DUTY}.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo(f"{DUTY}.csv")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    assert read([tmp_path]).metrics["gpu_duty_cycle"].height == 1
    write(tmp_path, DUTY, text + "2.0,0.0,p\n")
    with pytest.raises(InputError, match="differs from"):
        read([tmp_path])


def test_missing_table_is_noted(tmp_path: Path) -> None:
    """The note names the table and the figures that are unknown without it."""
    write(tmp_path, DUTY, "timestamp_anon,value,container_ip\n1.0,0.0,p\n")
    trace = read([tmp_path])
    assert trace.requests is None
    assert any("data_trace_processed.csv does not exist" in note and "popularity" in note for note in trace.notes)
    assert not any(DUTY in note for note in trace.notes)


def test_directory_without_tables_is_rejected(tmp_path: Path) -> None:
    """An empty directory is a mistake, not an empty trace."""
    with pytest.raises(InputError, match="no table of GenTD26") as caught:
        read([tmp_path])
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b,c\n1,2,3\n", r"no column timestamp_anon, value, container_ip; its header is 'a,b,c'"),
        ("timestamp_anon,container_ip\n1,2\n", r"no column value"),
        ("", r"the table is empty"),
        ("timestamp_anon,value,container_ip\n1.0,zero,p\n", r"record 1: value is 'zero', not a number"),
        ("timestamp_anon,value,container_ip\n1.0,1,p\n1.0,nan,p\n", r"record 2: value is 'nan', not a number"),
        ("timestamp_anon,value,container_ip\n1.0,inf,p\n", r"record 1: value is 'inf'"),
        (
            "timestamp_anon,value,container_ip\n\n1.0,0.0,p,too,many\n",
            r"csv:3: not a CSV table: more fields than the header",
        ),
        (b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X", r"no column"),
    ],
)
def test_invalid_table_is_rejected(tmp_path: Path, text: str | bytes, reason: str) -> None:
    """The error is one line with the file, the record and the reason."""
    write(tmp_path, DUTY, text)
    with pytest.raises(InputError, match=reason) as caught:
        read([tmp_path])
    assert "\n" not in str(caught.value)
    assert DUTY in str(caught.value)


def test_rows_without_value_are_dropped_and_unnamed_pods_kept(tmp_path: Path) -> None:
    """``NULL`` and an empty cell mean no pod."""
    write(tmp_path, DUTY, "\ufefftimestamp_anon, value,container_ip\r\n1.0,0.0,NULL\r\n2.0,,p\r\n3.0,7,\r\n")
    trace = read([tmp_path])
    assert trace.metrics["gpu_duty_cycle"].rows() == [(1.0, None, 0.0), (3.0, None, 7.0)]
    assert any("1 rows without a time or a value skipped" in note for note in trace.notes)


def test_table_without_final_newline_is_noted_as_possibly_cut(tmp_path: Path) -> None:
    """A truncated pod name looks like another pod; truncated archives are detected by themselves."""
    write(tmp_path, DUTY, "timestamp_anon,value,container_ip\n1.0,0.0,pod\n2.0,0.0,po")
    write(tmp_path, REQUESTS, REQUEST_HEADER + "t,3.0,m,[]\n")
    cut = [note for note in read([tmp_path]).notes if "cut" in note]
    assert cut == [f"{DUTY}.csv: the last line has no newline: the table may have been cut"]


def test_requests_and_their_lora_adapters_are_read(tmp_path: Path) -> None:
    """``lora_args`` is a Python literal; requests without a base model are kept and noted."""
    two = "\"[{'modelVersionId': 'x', 'scale': 1.0}, {'modelVersionId': 'y', 'scale': 0.5}]\""
    write(tmp_path, REQUESTS, REQUEST_HEADER + f"t,3.0,m,[]\nt,4.5,,{two}\nt,,m,\n")
    trace = read([tmp_path])
    assert trace.requests is not None
    assert trace.requests.rows() == [(3.0, "m", []), (4.5, None, ["x", "y"]), (None, "m", [])]
    assert any("1 requests do not name a base model" in note for note in trace.notes)


@pytest.mark.parametrize("cell", ["\"[{'other': 1}]\"", "__import__('os').system('true')", "[1", "7"])
def test_invalid_lora_args_are_rejected(tmp_path: Path, cell: str) -> None:
    """The literal is parsed, never evaluated."""
    write(tmp_path, REQUESTS, REQUEST_HEADER + f"t,3.0,m,{cell}\n")
    with pytest.raises(InputError, match="lora_args is"):
        read([tmp_path])


def test_invalid_utf8_does_not_reject_the_table(tmp_path: Path) -> None:
    """An invalid byte in a name changes only that name."""
    write(tmp_path, DUTY, b"timestamp_anon,value,container_ip\n1.0,0.0,p\xff\n")
    assert read([tmp_path]).metrics["gpu_duty_cycle"]["value"].to_list() == [0.0]


def test_published_archives_are_read(shared_data: Path) -> None:
    """Every table of the published trace is found, and macOS attributes are ignored."""
    trace = read([shared_data / "gentd26"])
    assert set(trace.metrics) == {
        "gpu_duty_cycle", "gpu_memory", "host_memory", "load_base_model", "load_lora", "load_controlnet",
        "load_pipeline", "predict", "pipeline_inference", "queue_time", "queue_size",
    }  # fmt: skip
    assert trace.requests is not None
    assert not any("does not exist" in note for note in trace.notes)


def test_requests_of_the_same_second_do_not_have_the_order_of_the_file(tmp_path: Path) -> None:
    models = ((9, "a"), (4, "b"), (2, "a"))
    rows = [f"2024-11-15 16:00:00,TXT_2_IMG,SUCCEED,{exec_s},{model}" for exec_s, model in models]
    head = "gmt_create,predict_type,predict_status,exec_time_seconds,checkpoint_model_version_id"
    for order in (rows, rows[::-1]):
        (tmp_path / "lora_request_trace.csv").write_text("\n".join([head, *order]) + "\n")
        requests, _ = read_timed_requests([tmp_path])
        assert requests.select("exec_s", "server").rows() == [(2, 0), (9, 0), (4, 1)]


def test_compressed_table_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data_trace_processed.csv").write_bytes(gzip.compress(b"a,b\n" * 99)[:-12])
    with pytest.raises(InputError, match=r"data_trace_processed\.csv: not a CSV table"):
        read([tmp_path])
