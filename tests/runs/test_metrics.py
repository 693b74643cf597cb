"""Rows go out as they are and come back as columns, whatever happened to the file in between."""

import json
import logging
import os

import ml_dtypes
import numpy as np
import pytest

from shoal.errors import ShoalError
from shoal.runs.metrics import BLOCK, RowWriter, last_rows, read_rows, tail, truncate_after


def chunk(updates, agents=3, **more):
    rng = np.random.default_rng(updates)
    return {
        "env_steps": updates * 128,
        "updates": updates,
        "wall_s": 0.1 * updates,
        "agent": np.arange(agents),
        "return_mean": rng.normal(size=agents).astype(np.float32),
        "alive": np.ones(agents, bool),
        **more,
    }


def write(path, *updates, **more):
    with RowWriter(path) as rows:
        for number in updates:
            rows.write(chunk(number, **more))


def test_rows_are_read_back_exactly_as_columns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    columns = read_rows(path)
    assert list(columns) == ["env_steps", "updates", "wall_s", "agent", "return_mean", "alive"]
    assert columns["env_steps"].tolist() == [128] * 3 + [256] * 3
    assert columns["agent"].tolist() == [0, 1, 2, 0, 1, 2]
    assert columns["wall_s"].tolist() == [0.1] * 3 + [0.2] * 3
    assert columns["alive"].dtype == bool
    assert columns["updates"].dtype == np.int64
    assert (columns["return_mean"][:3].astype(np.float32) == chunk(1)["return_mean"]).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_row_is_strict_json_that_keeps_its_precision(dtype, tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = np.array([np.nan, np.inf, -np.inf, 0.1, 1e-30 if dtype != np.float16 else 0, 3, -0.0]).astype(
        dtype
    )
    with RowWriter(path) as rows:
        rows.write({'odd "name": nan': values, "big": np.int64(2**60), "small": np.uint32(7)})
    refuse = lambda text: pytest.fail(f"{text} is not JSON")
    read = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [row['odd "name": nan'] for row in read[:3]] == [None] * 3
    np.testing.assert_array_equal(
        np.array([row['odd "name": nan'] for row in read[3:]]).astype(dtype), values[3:]
    )
    assert read[0]["big"] == 2**60
    assert np.isnan(read_rows(path)['odd "name": nan'][:3]).all()


def test_a_whole_number_of_a_float_column_stays_a_float(tmp_path):
    write(tmp_path / "m", 1, return_mean=np.full(3, 100, np.float32))
    assert read_rows(tmp_path / "m")["return_mean"].dtype == np.float64


def test_columns_may_come_and_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    write(path, 2, loss=np.float32(0.5))
    write(path, 3)
    np.testing.assert_array_equal(read_rows(path)["loss"], [np.nan] * 3 + [0.5] * 3 + [np.nan] * 3)


def test_columns_may_come_and_go_between_blocks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, agents=BLOCK)
    with RowWriter(path) as rows:
        rows.write({"updates": 2, "loss": 0.5})
    columns = read_rows(path)
    assert np.isnan(columns["loss"][:BLOCK]).all()
    assert columns["loss"][-1] == 0.5
    assert np.isnan(columns["alive"][-1])
    assert {len(column) for column in columns.values()} == {BLOCK + 1}


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none") == {}
    assert tail(tmp_path / "none") == ([], 0)
    truncate_after(tmp_path / "none", 3)
    assert not (tmp_path / "none").exists()


def test_rows_beyond_the_checkpoint_are_cut_and_a_torn_one_goes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    until = path.read_bytes()
    write(path, 3)
    path.write_bytes(path.read_bytes() + b'{"env_steps": 51')
    assert len(read_rows(path)["agent"]) == 9
    truncate_after(path, 2)
    assert path.read_bytes() == until
    write(path, 3)
    assert read_rows(path)["updates"].tolist() == [1] * 3 + [2] * 3 + [3] * 3


@pytest.mark.parametrize("row", [b'{"upd', b"5", b"[]", b"1,2", b"\xff"])
def test_a_damaged_row_in_the_middle_is_named(row, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"updates": 1}\n' + row + b'\n{"updates": 2}\n')
    for read in (read_rows, tail, last_rows, lambda path: truncate_after(path, 2)):
        if read is last_rows:
            path.write_bytes(path.read_bytes() + row + b"\n")
        with pytest.raises(ShoalError, match=r"metrics.jsonl has a damaged row"):
            read(path)


@pytest.mark.parametrize("value", ['"x"', "[1, 2]", "{}"])
def test_what_is_no_number_is_named(value, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"updates": 1}}\n{{"updates": {value}}}\n')
    with pytest.raises(ShoalError, match=r"metrics.jsonl is damaged"):
        read_rows(path)


def test_the_last_rows_are_those_of_the_last_chunk(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_rows(path) == []
    write(path, 1, 2)
    assert {row["updates"] for row in last_rows(path)} == {2}
    assert len(last_rows(path)) == 3


def test_tail_gives_each_row_once_and_waits_for_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    rows, offset = tail(path)
    assert [row["agent"] for row in rows] == [0, 1, 2]
    assert tail(path, offset) == ([], offset)
    with open(path, "ab") as file:
        file.write(b'{"updates": 2')
        file.flush()
        assert tail(path, offset) == ([], offset)
        file.write(b"}\n")
    rows, offset = tail(path, offset)
    assert rows == [{"updates": 2}]
    truncate_after(path, 0)
    write(path, 1, agents=1)
    assert len(tail(path, offset)[0]) == 1


def test_a_full_disk_costs_rows_and_one_warning_never_the_training(tmp_path, caplog, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    rows = RowWriter(path)
    rows.write(chunk(1))

    class Full:
        def __init__(self, file):
            self.file = file
            self.truncate, self.close = file.truncate, file.close

        def write(self, data):
            return self.file.write(data[: len(data) // 2])  # half of it fits

    rows._file = Full(rows._file)
    for updates in (2, 3):
        rows.write(chunk(updates))
    rows._file = rows._file.file
    rows.write(chunk(4))
    rows.close()
    assert read_rows(path)["updates"].tolist() == [1] * 3 + [4] * 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_device_without_space_does_not_raise(caplog):
    with RowWriter(os.path.realpath("/dev/full")) as rows:
        rows.write(chunk(1))
    assert "Metrics are being lost" in caplog.text
