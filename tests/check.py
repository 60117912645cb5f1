#!/usr/bin/env python3
"""The first verdict on a change: builds what was changed with its own unit tests, and runs those.

    ./tests/check.sh                           what differs from the last commit
    ./tests/check.sh scheduler/warm_policy.cpp …       those files

A folder's unit tests lie under its name in tests/; of the Python package, a module's are the files of tests/runtime/step that have
its name or mention it. Loops and searches are short here. What only real processes show is left to tests/run.sh. Exit status: 0 all
passed, 1 something failed, 2 there is nothing to check.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from run_stages import PYTEST_ENVIRONMENT, ROOT, SHORTEST, chosen_python, set_lengths

PACKAGE = Path("runtime/python/sluice")
STEP_TESTS = Path("tests/runtime/step")
STEP_CASES = Path("tests/runtime/step_cases")  # which the steps of both languages pass
#: Where a folder's tests do not have its name.
ELSEWHERE = {"runtime/torch/step": "runtime/torch_step", "runtime/torch/model": "runtime/server_model",
             "runtime/server/hosting": "runtime/server_model", "abi/gate_api.h": "runtime/gate", "abi/step_api.h": "runtime/step",
             "abi/store_api.h": "nccl_shim", "abi/nccl_abi.hpp": "nccl_shim"}
#: What all modules of the package come together in.
OF_ALL_MODULES = [STEP_TESTS / "values_test.py", STEP_TESTS / "planning_test.py", STEP_TESTS / "step_errors_test.py"]


def changed() -> list[Path]:
    """What differs from the last commit, new files too."""
    asked = (["diff", "--name-only", "--relative", "-z", "HEAD"], ["ls-files", "-z", "--others", "--exclude-standard"])
    listed = "".join(subprocess.run(["git", *each], cwd=ROOT, capture_output=True, text=True, check=True).stdout for each in asked)
    return [Path(name) for name in listed.split("\0") if name]


def room_of(file: Path) -> Path | None:
    """The folder of C++ tests that is nearest to a source, or that a test lies in."""
    for folder in (file, *file.parents):
        name = str(folder)
        tests = Path(name if name.startswith("tests/") else f"tests/{ELSEWHERE.get(name, name)}")
        if name != "." and (ROOT / tests / "CMakeLists.txt").exists():
            return tests
    return None


def tests_of_module(module: str) -> list[Path]:
    """The files of Python tests that have a module's name, or mention it."""
    name = module.lstrip("_")
    found = [file.relative_to(ROOT) for file in sorted((ROOT / STEP_TESTS).glob("*_test.py"))
             if file.name.startswith(name) or re.search(rf"\b{re.escape(module)}\b", file.read_text(encoding="utf-8"))]
    return found or OF_ALL_MODULES


def searches_of(model: str) -> list[Path]:
    """The tests of a model, as pytest names them."""
    file = Path("tests/model/model_test.py")
    parts = re.split(r"^def (\w+)", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    bodies = dict(zip(parts[::2], parts[1::2]))
    naming = {name for name, body in bodies.items() if re.search(rf'"{re.escape(model)}(\.pml)?"', body)}
    return [Path(f"{file}::{name}") for name, body in bodies.items()
            if name.startswith("test_") and (name in naming or any(f"{other}(" in body for other in naming))]


def plan(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """The folders of C++ tests, and the files of Python tests, of some files."""
    rooms, python = set(), set()
    for file in files:
        if file.suffix == ".py":
            if file.name.endswith("_test.py") and (ROOT / file).exists():
                python.add(file)
            elif file.is_relative_to(PACKAGE):
                python.update(tests_of_module(file.stem))
        elif file.suffix in (".cpp", ".hpp", ".h") or file.name == "CMakeLists.txt":
            if room := room_of(file):
                rooms.add(room)
        elif file.is_relative_to(STEP_CASES):
            rooms.add(Path("tests/runtime/torch_step"))
            python.add(STEP_TESTS / "step_cases_test.py")
        elif file.suffix == ".pml":
            python.update(searches_of(file.stem))
    return sorted(rooms), sorted(python)


def passes(*command: str | Path) -> bool:
    return subprocess.run(list(map(str, command)), cwd=ROOT, env={**os.environ, **PYTEST_ENVIRONMENT}, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    options = parser.parse_args()
    for file in options.files:
        if not file.exists():
            parser.error(f"{file} does not exist")
        if not file.resolve().is_relative_to(ROOT):
            parser.error(f"{file} is not in this checkout, {ROOT}")
    files = [file.resolve().relative_to(ROOT) for file in options.files] if options.files else changed()
    rooms, python = plan(files)
    if not rooms and not python:
        print("check: no unit tests lie near what was changed" if files else "check: nothing differs from the last commit", file=sys.stderr)
        return 2
    set_lengths(SHORTEST)
    started = time.monotonic()
    right = True
    jobs = str(os.cpu_count())
    if rooms:
        right = passes("scripts/build.sh", "release", *(f"{room}/all" for room in rooms))
        for room in rooms if right else ():
            right &= passes("ctest", "--test-dir", Path("build/release") / room, "-j", jobs, "--output-on-failure", "--progress")
    if python:
        right &= passes(chosen_python(), "-m", "pytest", "-q", "-n", jobs, "--dist=worksteal", *python)
    print(f"check: {'passed' if right else 'FAILED'} after {time.monotonic() - started:.0f} s: {' '.join(map(str, [*rooms, *python]))}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
