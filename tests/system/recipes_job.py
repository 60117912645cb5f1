"""Runs scripts, each in a process of its own, forked from this one, which has imported already what takes longest.

    recipes_job.py MODULE…

For each line of its standard input, a script with its arguments as a JSON list, it answers with the exit status.
"""

import functools
import importlib
import json
import os
import runpy
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from forks import fork  # noqa: E402


def run(command: list[str]) -> None:
    """In the forked process: the script, as Python would have started it."""
    torch.set_num_threads(1)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scripts print
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        process = fork(functools.partial(run, json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
