"""The benchmark of what parking is made of runs over the fake driver, whose device is the host."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import parking  # noqa: E402

MIB = 1 << 20


def test_each_part_has_a_cell(build):
    cells = parking.measure_parts(build, 64 * MIB, rounds=2, chunk=4 * MIB, fake=True)
    assert [cell.params["part"] for cell in cells] == ["copy out", "copy in", "hash", "hash and copy out"]
    assert all(cell.metrics["time_ratio"]["value"] > 0 for cell in cells)
    assert [cell.params["part"] for cell in cells if "first_chunk_ms" in cell.metrics] == ["copy out", "hash and copy out"]


def test_a_failure_is_said(build, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuModuleLoadData:218")  # CUDA_ERROR_INVALID_PTX
    with pytest.raises(SystemExit, match="status 1: .*clean and zero chunks are not found"):
        parking.measure_parts(build, 8 * MIB, rounds=1, chunk=2 * MIB, fake=True)
