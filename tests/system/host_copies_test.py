"""Host copies of a job under `sluice run` over the fake driver: the broker has them, and the job pins them."""

import json
import os
import re
import sys

from launching import call

JOB = """
import ctypes, json, subprocess, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
context = ctypes.c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
address = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(address), 1 << 20) == 0
calls = ctypes.CDLL(sys.argv[3]).fake_calls
calls.restype, calls.argtypes = ctypes.c_uint64, [ctypes.c_char_p]
deadline = time.monotonic() + 120
while calls(b"cuMemHostRegister_v2") < int(sys.argv[2]) and time.monotonic() < deadline:
    time.sleep(0.01)
status = json.loads(subprocess.run([sys.argv[1], "status", "--json"], capture_output=True, check=True).stdout)
print(json.dumps([calls(b"cuMemHostRegister_v2"), status["pool"]["host_copies"]]))
"""


def start(sluice, build, tmp_path, words, pieces):
    fake = build / "lib" / "fake_driver"
    same = tmp_path / "fake.so"  # the driver's own name is answered by the gate
    same.symlink_to(fake / "libcuda.so.1")
    return call(sluice, "run", "--backend", "cuda", "--memory", "256MiB", "--require-pool", *words, "--", sys.executable, "-S", "-c",
                JOB, str(sluice), str(pieces), same,
                env={**os.environ, "LD_LIBRARY_PATH": str(fake)})


def test_a_job_pins_the_host_copies_that_its_run_has_asked_for(sluice, build, tmp_path):
    done = start(sluice, build, tmp_path, ["--host-memory", "130MiB"], 2)
    assert done.returncode == 0, done.stderr
    pinned, copies = json.loads(done.stdout)
    assert pinned == 2
    slots = 2 * (64 << 20)
    assert copies == {"bytes": slots, "free_bytes": slots, "held_bytes": 0, "kept_bytes": 0, "damaged_bytes": 0,
                      "populated_bytes": slots, "disk": None, "warning": None}


def test_a_job_that_asked_for_none_has_none(sluice, build, tmp_path):
    done = start(sluice, build, tmp_path, [], 0)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, None]


def test_more_than_the_machine_has_is_refused_with_what_can_be_had(sluice, build, tmp_path):
    done = start(sluice, build, tmp_path, ["--host-memory", "100TiB"], 0)
    assert done.returncode != 0
    assert "host copies are to have 100 TiB, but of the" in done.stderr
    instead = int(re.search(r"ask for (\d+)MiB at most", done.stderr).group(1)) << 20
    total = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    assert 0 < instead < total


def test_less_than_a_chunk_is_refused_with_the_numbers(sluice, build, tmp_path):
    done = start(sluice, build, tmp_path, ["--host-memory", "1MiB"], 0)
    assert done.returncode != 0
    assert "1 MiB, but one takes 64 MiB" in done.stderr
