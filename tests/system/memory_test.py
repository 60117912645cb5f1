"""Who holds memory, and who has held it: what an out-of-memory error says, and what an address tells."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS

from launching import call

JOB = Path(__file__).with_name("memory_job.py")


def message(sluice, case: str) -> str:
    done = call(sluice, "run", "--backend", "host", "--memory", "64MiB", "--require-pool", "--", sys.executable, JOB, case)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("case", "kind"), [("plain", "OutOfMemoryError"), ("step", "OutOfMemoryError"),
                                            ("arena", "OutOfMemory")])
def test_an_out_of_memory_error_says_who_holds_the_pool_and_what_would_help(sluice, case, kind):
    said = message(sluice, case)
    assert said.startswith(kind + " ")
    assert said.count("of the pool's 64 MiB this job holds ") == 1
    assert " in its step arena, and " in said and " are free" in said
    assert "a larger pool (--memory of `sluice run`, pool.memory of the policy)" in said
    assert ("a smaller micro_batch" in said) == (case == "step")


ADDRESS_JOB = Path(__file__).with_name("address_job.py")
TAKEN = 16 << 20  # bytes of a handover
HANDOVERS = 5


def test_an_address_of_a_dead_job_tells_which_chunk_lay_there_and_who_took_it(sluice, runtime_folder, tmp_path):
    until, out = tmp_path / "until", tmp_path / "out.json"
    job = subprocess.Popen([sluice, "run", "--backend", "host", "--memory", "96MiB", "--require-pool", "--",
                            sys.executable, ADDRESS_JOB, until, out])
    server = call(sluice.with_name("sluice-bench-handover"), "--runtime-dir", runtime_folder, "--bytes", str(TAKEN),
                  "--count", str(HANDOVERS), "--delay-ms", "50", "--range",
                  env={**os.environ, "SLUICE_BROKER": str(sluice)})
    until.touch()
    assert job.wait(PATIENCE_SECONDS) == 0
    assert server.returncode == 0, server.stderr
    said = json.loads(out.read_text())
    assert f"sluice pool show --runtime-dir {runtime_folder} --pid {said['pid']} --address 0x" in said["fault"]
    outcomes = Counter()
    for generation, address in said["seen"]:
        told = json.loads(call(sluice, "pool", "show", "--json", "--pid", str(said["pid"]), "--address", hex(address)).stdout)
        here = [stay for stay in told["stays"] if stay["generation"] == generation]
        assert here, told
        # Between two micro-batches a demand takes the arena's end alone, which may grow again.
        assert all(stay["ended"]["how"] == "unmapped" for stay in here[1:]), told
        assert here[0]["holds"] == "arena" and here[0]["kind"] == "training" and not here[0]["lives"]
        if here[0]["ended"] and here[0]["ended"]["how"] == "revoked":
            next_owner = here[0]["went_to"]
            outcomes["kept" if next_owner is None else next_owner.get("kind") or "free"] += 1
    print(outcomes)
    assert outcomes["server"] > 0, "the chunks of no activation went to the server"

    text = call(sluice, "pool", "show", "--address", hex(address)).stdout
    assert f"in the step arena of generation {generation} of pid " in text and "has ended" in text
    assert "no process of this pool" in call(sluice, "pool", "show", "--address", "0x10").stdout
    another = call(sluice, "pool", "show", "--pid", str(os.getpid()), "--address", hex(address)).stdout
    assert "no process of this pool" in another
    wrong = call(sluice, "pool", "show", "--address", "here")
    assert wrong.returncode == 2 and "hexadecimal" in wrong.stderr
