"""The server of the handover benchmark, over the fake driver: what it takes from training it uses by a kernel."""

import json
import os
import subprocess

import pytest

from launching import call

MIB = 1 << 20
HANDOVERS = 10


@pytest.mark.parametrize("placement", [(), ("--range",)], ids=["tensors", "range"])
def test_a_kernel_runs_on_what_was_handed_over(build, sluice, tmp_path, runtime_folder, placement):
    environment = {**os.environ, "SLUICE_BROKER": str(sluice), "LD_LIBRARY_PATH": str(build / "lib" / "fake_driver")}
    counts = tmp_path / "counts"
    counts.write_bytes(bytes(4096))
    training = subprocess.Popen(
        [build / "bin" / "sluice-bench-isolation", "trainer", "--counts", counts, "--runtime-dir", runtime_folder,
         "--backend", "cuda", f"--memory={32 * MIB}", f"--chunk={2 * MIB}", f"--bytes={16 * MIB}"], env=environment)
    try:
        server = call(build / "bin" / "sluice-bench-handover", "--runtime-dir", runtime_folder, "--bytes", str(8 * MIB),
                      "--count", str(HANDOVERS), "--delay-ms", "20", *placement, env=environment)
    finally:
        training.kill()
        training.wait()
    assert server.returncode == 0, server.stderr
    taken = [json.loads(line) for line in server.stdout.splitlines()]
    assert len(taken) == HANDOVERS
    for one in taken:
        # A model's tensors take what is free first.
        assert one["bytes_reclaimed"] >= (8 * MIB if placement else 0)
        assert one["first_kernel_us"] >= one["latency_us"] > 0
