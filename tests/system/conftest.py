"""Fixtures of the system tests.

    world   a model repository, a policy and the servers of this test, which end with it (serving.py)
"""

import pytest


@pytest.fixture
def world(sluice, tmp_path, monkeypatch):
    from serving import World  # brings torch, which most of these tests do without

    monkeypatch.setenv("SLUICE_BACKEND", "host")
    made = World(sluice, tmp_path)
    yield made
    made.end()
