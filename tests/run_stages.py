"""Builds and runs the tests stage by stage, and adds up what came out. Called by run.sh.

There are two lanes of stages: in front what a change is seen by first, and behind it, with what processors that leaves, sanitizers
and lint. Most of the front's tests wait more than they compute. A lane that has done with its own takes over from the other.

A stage is one command. Its cases are read from the JUnit files that it writes; one that writes
none, such as a build, is a case itself. A stage that crashes, runs out of time or leaves no results
counts as a failed case, so nothing can be lost silently.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from detail.interpreter import chosen_python  # noqa: E402

RESULTS = ROOT / "build" / "test-results"
#: Hundreds of processes import torch and more: what they compile they leave in one folder, whether it lies beside its sources or not.
PYTEST_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode")}
SHOWN_LINES = 60  # of the output of each failure
PYTEST_FOUND_NO_TEST = "ended with status 5"
#: How long searches and loops are, where the caller's environment does not say; each test's comment tells what it counts.
SHORT = {"SLUICE_TEST_KILLS": 15, "SLUICE_TEST_INPUTS": 50_000, "SLUICE_TEST_OPERATIONS": 50_000, "SLUICE_TEST_CLOSES": 1000,
         "SLUICE_TEST_BATCHES": 150, "SLUICE_TEST_DISCARDS": 60, "SLUICE_TEST_GRAPHS": 100, "SLUICE_TEST_SHORTER": 5, "SLUICE_TEST_EVERY": 11,
         "SLUICE_TEST_HANDOVERS": 80}
LONG = {"SLUICE_TEST_LONG": 1, "SLUICE_TEST_BURSTS": 200_000, "SLUICE_TEST_KILLS": 300, "SLUICE_TEST_INPUTS": 1_500_000, "SLUICE_TEST_CLOSES": 30_000,
        "SLUICE_TEST_OPERATIONS": 2_000_000, "SLUICE_TEST_BATCHES": 3000, "SLUICE_TEST_DISCARDS": 1000, "SLUICE_TEST_GRAPHS": 2000,
        "SLUICE_TEST_EVERY": 1, "SLUICE_TEST_HANDOVERS": 2000}
#: Of a first verdict (check.py).
SHORTEST = {"SLUICE_TEST_KILLS": 3, "SLUICE_TEST_INPUTS": 10_000, "SLUICE_TEST_OPERATIONS": 10_000, "SLUICE_TEST_CLOSES": 300,
            "SLUICE_TEST_BATCHES": 50, "SLUICE_TEST_DISCARDS": 30, "SLUICE_TEST_GRAPHS": 50, "SLUICE_TEST_SHORTER": 10,
            "SLUICE_TEST_STRIDE": 10}
PYTHON = "the Python that setup.sh chooses"  # in a stage's command
SETUP = "setup of Python"
RELEASE = "build release"
BEHIND = ["nice", "-n", "15"]  # of what runs behind the front


@dataclass
class Case:
    """One test: `outcome` is passed, failed or skipped."""

    name: str
    outcome: str
    output: str = ""
    seconds: float = 0


@dataclass
class Stage:
    """One command, and the JUnit files (by glob, under RESULTS) in which it leaves its cases."""

    name: str
    command: list[str]
    junit: str = ""
    limit_seconds: float = 1500
    environment: dict[str, str] = field(default_factory=dict)
    may_be_empty: bool = False
    shows_times: bool = False  # of each case
    behind: bool = False
    after: str = ""  # a stage that it needs


def junit_cases(stage: str, file: Path) -> list[Case]:
    """The cases of a JUnit file as CTest, pytest and GoogleTest write it."""
    cases = []
    for element in ElementTree.parse(file).iter("testcase"):
        labels = (element.get("classname"), element.get("name"))
        name = f"{stage}: " + "::".join(dict.fromkeys(filter(None, labels)))
        bad = [e for e in element if e.tag in ("failure", "error")]
        skipped = element.find("skipped")
        seconds = float(element.get("time") or 0)
        # CTest also calls a test skipped whose program was not built: that must not pass unseen.
        by_choice = skipped is not None and (
            element.get("status") != "notrun" or skipped.get("message", "").startswith("SKIP_"))
        if bad or element.get("status") == "fail" or skipped is not None and not by_choice:
            parts = [e.get("message", "") + "\n" + (e.text or "") for e in bad]
            parts += [e.text or "" for e in element if e.tag in ("system-out", "system-err")]
            cases.append(Case(name, "failed", "\n".join(parts).strip(), seconds))
        else:
            cases.append(Case(name, "skipped" if by_choice else "passed", "", seconds))
    return cases


class Commands:
    """Those that run now, in both lanes; they end together if this program is ended."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._over = False

    def run(self, stage: Stage, log: Path) -> tuple[str, float]:
        """Returns why it did not end well, or nothing, and the seconds that processors have worked for it."""
        with log.open("wb") as output, self._lock:
            if self._over:
                return "was not begun", 0
            process = subprocess.Popen(
                [*(BEHIND if stage.behind else []), *(chosen_python() if word == PYTHON else word for word in stage.command)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **stage.environment}, start_new_session=True)
            self._running.add(process.pid)
        too_long = threading.Event()
        limit = threading.Timer(stage.limit_seconds, lambda: (too_long.set(), self._end(process.pid)))
        limit.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            limit.cancel()  # or this program would not end before it
        with self._lock:
            self._running.discard(process.pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        problem = f"ended with status {process.returncode}" if process.returncode else ""
        if process.returncode < 0:
            problem = f"was killed by signal {-process.returncode}"
        return f"did not end within {stage.limit_seconds:g} s" if too_long.is_set() else problem, used.ru_utime + used.ru_stime

    def _end(self, group: int) -> None:
        with self._lock:
            if group in self._running:  # else it has ended, and its number may be another's
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    def end_all(self) -> None:
        """And begin no more."""
        with self._lock:
            self._over = True
            running = list(self._running)
        for group in running:
            self._end(group)


class Suite:
    """All stages of one run."""

    def __init__(self, stages: list[Stage]) -> None:
        self._left = list(stages)
        self._taking = threading.Lock()
        self._commands = Commands()
        self._done = {stage.name: threading.Event() for stage in stages}
        self._printing = threading.Lock()
        self.times: dict[str, str] = {}  # what each stage has taken

    def run(self) -> list[Case]:
        """The cases of all stages."""
        with ThreadPoolExecutor(1) as behind:
            try:
                others = behind.submit(self._run_lane, True)
                return [*self._run_lane(False), *others.result()]
            except BaseException:
                self._commands.end_all()
                for done in self._done.values():
                    done.set()
                raise

    def _run_lane(self, behind: bool) -> list[Case]:
        cases = []
        while stage := self._next(behind):
            if stage.after:
                self._done[stage.after].wait()
            cases += self._run_stage(stage)
            self._done[stage.name].set()
        return cases

    def _next(self, behind: bool) -> Stage | None:
        """What a lane does next: the first of its own that is left, else the last of the other's."""
        with self._taking:
            own = [stage for stage in self._left if stage.behind == behind]
            if not self._left:
                return None
            stage = own[0] if own else self._left[-1]
            self._left.remove(stage)
            return stage

    def _run_stage(self, stage: Stage) -> list[Case]:
        """Its cases, at least one unless it may be empty."""
        started = time.monotonic()
        log = RESULTS / f"{stage.name.replace(' ', '-')}.log"
        problem, computed = self._commands.run(stage, log)
        seconds = time.monotonic() - started
        cases = []
        files = sorted(RESULTS.glob(stage.junit)) if stage.junit else []
        for file in files:
            try:
                cases += junit_cases(stage.name, file)
            except ElementTree.ParseError as error:
                cases.append(Case(f"{stage.name}: {file.name}", "failed", f"cannot be read: {error}"))
        if stage.may_be_empty and not cases:
            problem = problem.replace(PYTEST_FOUND_NO_TEST, "")
        elif stage.junit and not cases:
            problem = problem or "ran no test"
        if not (stage.junit or problem):
            cases.append(Case(stage.name, "passed"))
        if problem and not any(case.outcome == "failed" for case in cases):
            cases.append(Case(f"{stage.name}: {problem}", "failed", log.read_text(errors="replace")))
        self.times[stage.name] = f"{seconds:.0f} s ({computed / seconds:.1f} processors)"
        with self._printing:
            print(f"==> {stage.name}: {counted(cases)} ({seconds:.0f} s)")
            for case in sorted(cases, key=lambda case: -case.seconds) if stage.shows_times else ():
                print(f"    {case.seconds:6.1f} s  {case.name}")
            sys.stdout.flush()
        return cases


def counted(cases: list[Case]) -> str:
    """How many came out in which way."""
    count = {outcome: sum(case.outcome == outcome for case in cases) for outcome in ("passed", "failed", "skipped")}
    return ", ".join(f"{number} {outcome}" for outcome, number in count.items() if number) or "nothing"


def fixed_addresses() -> list[str]:
    """A prefix that turns address randomisation off, which older ThreadSanitizers cannot bear."""
    prefix = ["setarch", "--addr-no-randomize"]
    if not shutil.which("setarch"):
        return []
    return prefix if subprocess.run([*prefix, "true"], check=False).returncode == 0 else []


def has_gpu() -> bool:
    """Whether a driver answers for at least one GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def tests_at_once_on_gpu() -> int:
    """What one GPU's memory and the processors bear: one case of four ranks (tests/gpu/data_parallel_gpu_test.py), which take
    24 GiB, and others of two, with 14."""
    listed = subprocess.run(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"],
                            capture_output=True, text=True, check=False)
    free_mib = int(listed.stdout) if listed.returncode == 0 and listed.stdout.strip().isdigit() else 0
    return max(1, min((os.cpu_count() or 1) // 3, 1 + (free_mib // 1024 - 24) // 14))


def set_lengths(lengths: dict[str, int]) -> None:
    """Of what this process starts, where the caller's environment does not say."""
    for name, value in lengths.items():
        os.environ.setdefault(name, str(value))


def unit_tests(preset: str, pattern: str) -> Stage:
    """The unit tests of a preset, through CTest."""
    command = ["ctest", "--preset", preset, "--output-junit", str(RESULTS / f"unit-{preset}.xml"),
               "--no-tests=ignore", "-j", str(os.cpu_count())]
    if pattern:
        command += ["-R", pattern]
    prefix = fixed_addresses() if preset == "tsan" else []
    return Stage(f"unit tests {preset}", prefix + command, f"unit-{preset}.xml",
                 may_be_empty=bool(pattern))


def prebuilt_unit_tests(pattern: str) -> Stage:
    """The unit tests of build/release without CTest, whose files name the machine that built it."""
    names = (ROOT / "build" / "release" / "unit_tests.txt").read_text().split()
    script = "status=0\n"
    for name in names:
        result = RESULTS / f"unit-prebuilt-{name}.xml"
        script += (f"build/release/bin/{name} --gtest_output=xml:{result}"
                   + (f" --gtest_filter='*{pattern}*'" if pattern else "")
                   + f" || {{ status=$?; echo \"{name} ended with status $status\"; }}\n")
    return Stage("unit tests prebuilt", ["bash", "-c", script + "exit $status"],
                 "unit-prebuilt-*.xml", may_be_empty=bool(pattern))


def pytest_stage(name: str, paths: list[str], pattern: str, *options: str, shows_times: bool = False, after: str = "") -> Stage:
    """pytest over `paths`, with the Python that has torch."""
    junit = f"pytest-{name.split()[0]}.xml"
    command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={RESULTS / junit}",
               "--durations=10", *options, *paths]
    if pattern:
        command += ["-k", pattern]
    return Stage(name, command, junit, limit_seconds=3600, may_be_empty=bool(pattern), shows_times=shows_times,
                 after=after, environment=PYTEST_ENVIRONMENT)


def planned_stages(options: argparse.Namespace) -> list[Stage]:
    """The stages that this run takes, cheap answers first."""
    build = "./scripts/build.sh"
    whole = not (options.fast or options.prebuilt or options.pattern or options.long)
    setup = ["./scripts/setup.sh", "--tests", "--python-only", *(["--lint"] if whole else [])]
    stages = [Stage(SETUP, setup, limit_seconds=3600)]
    built = "" if options.prebuilt else RELEASE
    if options.prebuilt:
        stages.append(prebuilt_unit_tests(options.pattern))
    else:
        stages.append(Stage(RELEASE, [build, "release"], limit_seconds=2400, after=SETUP))
        stages.append(dataclasses.replace(unit_tests("release", options.pattern), after=RELEASE))
    at_once = f"--numprocesses={os.cpu_count()}"
    stages.append(pytest_stage("python unit tests", ["tests", "--ignore=tests/gpu", "--ignore=tests/system"], options.pattern, at_once,
                               "--dist=worksteal", after=built))
    stages.append(pytest_stage("system tests", ["tests/system"], options.pattern, at_once, "--dist=loadgroup", after=built))
    if has_gpu():  # which some system tests use as well
        stages.append(pytest_stage("gpu tests", ["tests/gpu"], options.pattern, f"--numprocesses={tests_at_once_on_gpu()}",
                                   "--dist=loadgroup", shows_times=True, after="system tests"))
    else:
        print("    no GPU here: the GPU tests are left out")
    if whole:
        behind = []
        for preset in ("asan", "tsan"):
            made = Stage(f"build {preset}", [build, preset], limit_seconds=3600)
            behind += [made, dataclasses.replace(unit_tests(preset, ""), after=made.name)]
        behind.append(Stage("lint", ["./scripts/lint.sh", f"--junit={RESULTS / 'lint.xml'}"], "lint.xml", after=RELEASE))
        stages += [dataclasses.replace(stage, behind=True, limit_seconds=3600) for stage in behind]
    return stages


def show_failures(cases: list[Case]) -> None:
    """Prints every failed case with the end of its output, and the names again below."""
    failed = [case for case in cases if case.outcome == "failed"]
    for case in failed:
        lines = case.output.strip().splitlines()
        left_out = len(lines) - SHOWN_LINES
        print(f"\n---- failed: {case.name}")
        if left_out > 0:
            print(f"[{left_out} lines left out]")
        print("\n".join(lines[-SHOWN_LINES:]))
    print()
    for case in failed:
        print(f"failed: {case.name}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.sh")
    parser.add_argument("--fast", action="store_true", help="no sanitizers, no lint")
    parser.add_argument("--long", action="store_true", help="searches and loops at length")
    parser.add_argument("--prebuilt", action="store_true", help="with build/release as it is")
    parser.add_argument("-k", dest="pattern", default="", metavar="PATTERN")
    parser.add_argument("--setup-status", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is ended, too

    set_lengths(LONG if options.long else SHORT)
    started = time.monotonic()
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    cases = [Case("setup of the system", "passed")]
    if options.setup_status:
        problem = f"setup.sh ended with status {options.setup_status}: see the top"
        cases = [Case("setup of the system", "failed", problem)]
    suite = Suite(planned_stages(options))
    cases += suite.run()

    show_failures(cases)
    count = {o: sum(c.outcome == o for c in cases) for o in ("passed", "failed", "skipped")}
    if count["skipped"]:
        print("\n".join(f"skipped: {c.name}" for c in cases if c.outcome == "skipped"))
    print("stages: " + ", ".join(f"{name} {taken}" for name, taken in suite.times.items()))
    print(f"took {time.monotonic() - started:.0f} s; logs in {RESULTS.relative_to(ROOT)}")
    print(f"{count['passed']} passed, {count['failed']} failed")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
