"""A job that finds too little memory is told who holds it, and what would help."""

import sys
from pathlib import Path

import pytest

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
