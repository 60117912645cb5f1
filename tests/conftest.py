"""What all pytest tests share: where the build is, a world of their own, and a deadline.

Fixtures
    checkout        folder of the source tree
    build           folder of the build under test: SLUICE_BUILD_DIR, else build/release
    sluice          the program `sluice` of that build; a test that asks for it fails without it
    runtime_folder  where this test's broker lives, new for each test (SLUICE_RUNTIME_DIR)

Every test runs under a deadline of five minutes, many times what it takes alone; `@pytest.mark.deadline(seconds)` sets another.
An exception that nobody catches in a thread of a test fails the test.
Every process that a test leaves behind, also one that detached itself, is killed when it ends.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_DEADLINE_SECONDS = 300.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def pytest_configure(config):
    config.addinivalue_line("markers", "deadline(seconds): fail the test when it takes longer")
    config.addinivalue_line("markers", "long: of the long form, tests/run.sh --long; runs only with SLUICE_TEST_LONG=1")
    # A test whose threads failed has failed.
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnhandledThreadExceptionWarning")
    # gloo would look for this host's name, and at times waits for ever in connecting to what that leads to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A shell starts background jobs with SIGINT ignored, and what is ignored here is ignored in what the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Daemons that tests start become children of this process, so that they can be found and ended.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("deadline")
    seconds = marker.args[0] if marker else DEFAULT_DEADLINE_SECONDS

    def out_of_time(_signal, _frame):
        pytest.fail(f"did not end within its deadline of {seconds:g} s")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("long") and os.environ.get("SLUICE_TEST_LONG") != "1":
            item.add_marker(pytest.mark.skip(reason="of the long form: tests/run.sh --long"))


def descendants(spared: set[int]) -> set[int]:
    """All processes below this one, without `spared` and what is below those."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items()
                   if parent in found | {os.getpid()} and pid not in found | spared}:
        found |= more
    return found


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    before = descendants(set())
    yield
    while left := descendants(before):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # its parent was killed a moment ago
                os.waitpid(pid, 0)


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch):
    """A short path: the address of a Unix socket has room for 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-test-"))
    monkeypatch.setenv("SLUICE_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def checkout() -> Path:
    return CHECKOUT


@pytest.fixture(scope="session")
def build() -> Path:
    folder = Path(os.environ.get("SLUICE_BUILD_DIR", CHECKOUT / "build" / "release"))
    if not (folder / "bin").is_dir():
        pytest.fail(f"{folder} holds no build: run ./scripts/build.sh first")
    return folder


@pytest.fixture(scope="session")
def sluice(build) -> Path:
    program = build / "bin" / "sluice"
    if not os.access(program, os.X_OK):
        pytest.fail(f"{program} is not there: run ./scripts/build.sh first")
    return program
