"""Fixtures of the system tests.

    world        a model repository, a policy and the servers of this test, which end with it (serving.py)
    disk_folder  a folder on the disk that the build is on; other temporary ones may be in memory
"""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def disk_folder(build):
    with tempfile.TemporaryDirectory(prefix="disk-", dir=build) as made:
        yield Path(made).resolve()


@pytest.fixture
def world(sluice, tmp_path, monkeypatch):
    from serving import World  # brings torch, which most of these tests do without

    monkeypatch.setenv("SLUICE_BACKEND", "host")
    made = World(sluice, tmp_path)
    yield made
    made.end()
