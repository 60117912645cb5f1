"""Builds and tests Sluice with several versions of PyTorch and of Python, and prints a table of what came out.

For each version an environment with each Python is made (5 GB, removed afterwards), Sluice is built against its torch, and what
works with torch runs on the host: the step, memory, the server and the launcher. The libraries are the same for all Pythons.

    ./tests/torch_matrix.sh                                     what the package index has, from 2.11 on
    ./tests/torch_matrix.sh --torch 2.11.0 2.15.0 --python python3.12

Exit status: 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from run_stages import PYTEST_ENVIRONMENT, SHORT, junit_cases, set_lengths

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (2, 11)
#: Folders of unit tests that are built against torch, or start what is; where not all of one are, which.
UNIT_TESTS = {"runtime/torch_step": "", "runtime/server_model": "", "runtime/launcher": "", "nccl_shim": "two_hosts|torch_part"}
PYTEST = {
    "step": ["tests/runtime/step"],
    "memory": ["tests/system/memory_test.py", "tests/system/exactness_test.py", "tests/system/step_test.py"],
    "processes": ["tests/system/data_parallel_test.py", "tests/system/shards_on_host_test.py"],
    "server": ["tests/system/server_test.py", "tests/system/cpp_step_test.py"],
    "launcher": ["tests/system/launcher_test.py", "tests/system/launcher_pool_test.py", "tests/system/unmodified_test.py",
                 "tests/system/recipes_test.py"],
}
FEATURES = """
import sys
sys.path.insert(0, "runtime/python")
from sluice import _torch_compat as compat
print("; ".join(feature.what for name, feature in compat.FEATURES.items() if not compat.has(name)))
"""


@dataclass
class Row:
    """A combination, and what its tests came to."""

    torch: str
    python: str
    lost: str = ""
    count: dict[str, int] = field(default_factory=lambda: {"passed": 0, "failed": 0, "skipped": 0})
    problems: list[str] = field(default_factory=list)
    seconds: float = 0

    def add(self, stage: str, junit: Path) -> None:
        for case in junit_cases(stage, junit):
            self.count[case.outcome] += 1
            if case.outcome == "failed":
                self.problems.append(case.name)

    @property
    def failed(self) -> bool:
        return bool(self.problems or self.count["failed"] or not self.count["passed"])

    def __str__(self) -> str:
        return (f"| {self.torch} | {self.python} | {self.count['passed']} | {self.count['failed']} | {self.count['skipped']} | "
                f"{self.lost or 'nothing'} | {self.seconds:.0f} s |")


def versions_on_index() -> list[str]:
    """The newest of each minor version from the oldest on."""
    listed = subprocess.run([sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False)
    found = re.search(r"Available versions: (.*)", listed.stdout)
    if not found:
        raise SystemExit(f"torch_matrix: the package index does not say which versions of torch it has; name them with --torch\n{listed.stderr}")
    newest: dict[tuple[int, ...], str] = {}
    for version in found.group(1).split(", "):
        newest.setdefault(tuple(map(int, version.split(".")[:2])), version)
    return [version for minor, version in sorted(newest.items()) if minor >= OLDEST]


def make_environment(folder: Path, python: str, torch: str) -> Path:
    """With torch and what the tests need; returns its interpreter."""
    interpreter = folder / "bin" / "python3"
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    needs = [line for line in (ROOT / "scripts" / "requirements.txt").read_text().splitlines() if line and not line.startswith(("#", "torch="))]
    files = [word for name in ("examples", "tests") for word in ("-r", ROOT / name / "requirements.txt")]
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir", "--disable-pip-version-check",
                    f"torch=={torch}", *needs, *files], check=True)
    return interpreter


def build(folder: Path, interpreter: Path, log: Path) -> bool:
    folders = ("runtime", "runtime/torch", "nccl_shim", *(f"tests/{room}" for room in UNIT_TESTS))
    targets = [*(f"{each}/all" for each in folders), "sluice-bench-handover"]
    with log.open("w") as output:
        for command in (["cmake", "--preset", "release", "-B", folder, f"-DSLUICE_PYTHON={interpreter}", "--log-level=NOTICE"],
                        ["cmake", "--build", folder, "--target", *targets, "--", "-k", "0"]):
            if subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode:
                return False
    return True


def run_tests(row: Row, built: Path, interpreter: Path, only: str, results: Path) -> None:
    environment = {**os.environ, **PYTEST_ENVIRONMENT, "SLUICE_BUILD_DIR": str(built),
                   "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}"}
    commands = {}
    for room, which in UNIT_TESTS.items():
        name = f"units-{Path(room).name}"
        commands[name] = ["ctest", "--test-dir", built / "tests" / room, "-R", which, "--output-junit", results / f"{name}.xml",
                          "-j", str(os.cpu_count())]
    for name, paths in PYTEST.items():
        at_once = ["--numprocesses", str(os.cpu_count()), f"--dist={'worksteal' if name == 'step' else 'loadgroup'}"]
        commands[name] = [interpreter, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={results / name}.xml", *at_once, *paths]
    for name, command in commands.items():
        if only and name.partition("-")[0] not in only.split(","):
            continue
        with (results / f"{name}.log").open("w") as output:
            status = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                                    check=False).returncode
        file = results / f"{name}.xml"
        if file.exists():
            row.add(name, file)
        if status and not row.problems:
            row.problems.append(f"{name} ended with status {status}: {results / name}.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="these versions")
    parser.add_argument("--python", nargs="+", default=["python3"], metavar="PROGRAM", help="with these interpreters (default %(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help=f"some of units, {', '.join(PYTEST)}; with commas between")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix", help="where environments and results lie (default %(default)s)")
    args = parser.parse_args()
    if unknown := set(filter(None, args.only.split(","))) - {"units", *PYTEST}:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}, but units, {', '.join(PYTEST)}")
    if missing := [python for python in args.python if not shutil.which(python)]:
        parser.error(f"--python: {', '.join(missing)} cannot be found")

    set_lengths(SHORT)
    rows: list[Row] = []
    for version in args.torch or versions_on_index():
        minor = ".".join(version.split(".")[:2])
        built = ROOT / "build" / f"torch-{minor}"
        not_built = None  # why; not known before the first Python
        environments = []
        for python in args.python:
            row = Row(version, subprocess.run([python, "-c", "import platform; print(platform.python_version())"], capture_output=True,
                                              text=True, check=True).stdout.strip())
            rows.append(row)
            began = time.monotonic()
            results = args.folder / f"results-{minor}-{row.python}"
            shutil.rmtree(results, ignore_errors=True)
            results.mkdir(parents=True)
            environments.append(args.folder / f"{minor}-{row.python}")
            print(f"==> torch {version} with Python {row.python}", file=sys.stderr, flush=True)
            interpreter = make_environment(environments[-1], python, version)
            if not_built is None:
                log = results / "build.log"
                not_built = "" if build(built, interpreter, log) else f"it does not build: {log}"
            if not_built:
                row.problems.append(not_built)
            else:
                row.lost = subprocess.run([interpreter, "-c", FEATURES], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
                run_tests(row, built, interpreter, args.only, results)
            row.seconds = time.monotonic() - began
            for problem in row.problems:
                print(f"    failed: {problem}", file=sys.stderr)
        if not args.keep:
            for folder in environments:
                shutil.rmtree(folder, ignore_errors=True)
    print("| torch | Python | passed | failed | skipped | lost | took |\n|---|---|---|---|---|---|---|")
    print("\n".join(map(str, rows)))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
