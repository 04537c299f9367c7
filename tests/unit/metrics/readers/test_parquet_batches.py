"""Memory and time for Parquet files that are larger than their size suggests."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers import parquet_batches

MIB = 1 << 20


def written(path: Path, **columns: pa.Array) -> Path:
    """Write a table, without the schema of Arrow."""
    pq.write_table(pa.table(columns), path, compression="zstd", store_schema=False)
    return path


def repeated(text: str, rows: int) -> pa.Array:
    """Return a column with one text in all rows, which takes little more than the text in the file."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def read(path: Path, *columns: str) -> list[pa.RecordBatch]:
    """Return all batches."""
    with parquet_batches.opened(path, "f") as file:
        return list(parquet_batches.batches(file, 500_000, columns, "f"))


@pytest.mark.parametrize("kind", ["text", "list", "struct"])
def test_repeated_text_is_expanded_in_slices(tmp_path: Path, kind: str) -> None:
    column = repeated("x" * MIB, 200)
    if kind == "list":
        column = pa.ListArray.from_arrays(pa.array(range(0, 201, 2), pa.int32()), column)
    if kind == "struct":
        column = pa.StructArray.from_arrays([column, pa.array(range(200))], ["a", "b"])
    result = read(written(tmp_path / "f", s=column, n=pa.array(range(len(column)))), "n", "s")
    assert [n for batch in result for n in batch.column(0).to_pylist()] == list(range(len(column)))
    plain = {
        "text": pa.string(),
        "list": pa.list_(pa.string()),
        "struct": pa.struct({"a": pa.string(), "b": pa.int64()}),
    }
    assert {batch.column(1).type for batch in result} == {plain[kind]}
    assert len(result) == 4
    assert all(batch.nbytes <= parquet_batches.SLICE_BYTES + MIB for batch in result)
    text = "x" * MIB
    assert result[0].column(1)[0].as_py() == {"text": text, "list": [text] * 2, "struct": {"a": text, "b": 0}}[kind]


def test_row_larger_than_a_slice_is_read_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "f", s=pa.array(["x" * (65 * MIB), None, "y"]))
    assert [len(batch) for batch in read(path, "s")] == [1, 2]


def test_text_that_expands_beyond_the_size_of_the_file_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path / "f", s=repeated("x" * MIB, 3000))
    assert path.stat().st_size < MIB
    with pytest.raises(
        InputError, match=r"f: unpacks to 3,\d+,\d+,\d+ bytes of text in 3,000 rows, at most 1,073,741,8"
    ):
        read(path, "s")


def test_more_values_than_the_size_of_the_file_explains_are_rejected(tmp_path: Path) -> None:
    """A run length encodes any number of rows in a few bytes."""
    count = parquet_batches.FEW_VALUES + 1
    path = written(tmp_path / "f", n=pa.nulls(count, pa.int64()))
    with pytest.raises(InputError, match="f: has 10,000,001 values in a column, at most 10,000,000 fit"):
        read(path, "n")


def test_data_that_unpacks_to_more_than_the_size_of_the_file_allows_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_batches, "most_unpacked", lambda size: 10 * size)
    path = tmp_path / "f"
    pq.write_table(pa.table({"n": pa.array([0.0] * 100_000)}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(InputError, match=r"f: unpacks to 8\d\d,\d+ bytes, at most \d+,?\d* fit"):
        read(path, "n")


def test_values_of_a_large_fixed_size_are_rejected(tmp_path: Path) -> None:
    """They have no dictionary that could be kept."""
    path = written(tmp_path / "f", s=pa.array([b"x" * 2000], pa.binary(2000)))
    with pytest.raises(InputError, match="f: has values of a fixed size above 1,024 bytes in column s"):
        read(path, "s")


def test_maps_are_rejected(tmp_path: Path) -> None:
    path = written(tmp_path / "f", s=pa.array([[("a", "x")]], pa.map_(pa.string(), pa.string())))
    with pytest.raises(InputError, match="f: has a type in column s that is not read"):
        read(path, "s")


def test_decimal_numbers_and_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    decimals = pa.array(["1.50", "2.25"]).cast(pa.decimal128(5, 2))
    pq.write_table(pa.table({"d": decimals, "b": pa.array([b"x", None])}), path)
    [batch] = read(path, "d", "b")
    assert batch.column(0).equals(decimals)
    assert batch.column(1).to_pylist() == [b"x", None]


def test_row_groups_with_different_dictionaries_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    pq.write_table(pa.table({"s": [f"name-{at // 2}" for at in range(100)]}), path, row_group_size=7)
    assert [text for batch in read(path, "s") for text in batch.column(0).to_pylist()] == [
        f"name-{at // 2}" for at in range(100)
    ]
