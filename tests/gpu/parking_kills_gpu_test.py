"""Jobs, servers and brokers are killed at random instants of parking on a GPU: the others go on, and each page holds what it should."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

from parking_kills_test import SEED, Killer  # noqa: E402
from parking_test import Pool  # noqa: E402

KILLS = int(os.environ.get("SLUICE_TEST_PARKING_KILLS", "60"))


@pytest.fixture
def pool(sluice, build, tmp_path):
    made = Pool(sluice, build, tmp_path / "runtime")
    yield made
    made.end()


@pytest.mark.deadline(590)
def test_whoever_is_killed_the_others_go_on_and_nothing_is_lost(pool):
    killer = Killer(pool, SEED)
    try:
        while sum(killer.struck.values()) < KILLS:
            killer.kill()
        killer.all_is_accounted_for()
    finally:
        print(f"seed {SEED}:", *(f"{who} {phase}: {count}" for (who, phase), count in sorted(killer.struck.items())), sep="\n  ", flush=True)
    for job in [*killer.survivors, *killer.jobs.values()]:
        result = job.result()
        assert result["wrong pages"] == 0
        assert result["rounds"] > 0
