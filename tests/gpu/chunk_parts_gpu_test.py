"""Copies and hashes of chunks on a GPU: tests/memhandover/chunk_parts_test.cpp, which CTest runs over the fake driver."""

import re
import subprocess

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_chunks_are_copied_and_hashed_as_over_the_fake_driver(build):
    done = subprocess.run([build / "bin" / "chunk_parts_test"], capture_output=True, text=True, check=False)
    print(done.stdout[-4000:], done.stderr[-4000:])
    assert done.returncode == 0
    assert int(re.search(r"\[  PASSED  \] (\d+) tests", done.stdout)[1]) >= 6
    assert "SKIPPED" not in done.stdout
