"""What parking is made of, on a GPU: chunks copied through the ring, out and back, their hash, and each copied behind its hash.

Each is compared with one plain copy of the same bytes out, in the same round. `--parts` is all there is so far: no process is
parked. With `--fake` the driver is the tests', whose device is the host: for trying, and its record lies beside the build.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from records import RESULTS, ROOT, Cell, distribution, single, write

MIB, GIB = 1 << 20, 1 << 30
PLAIN = "one plain copy of the same bytes out, same round"
PARTS = {"copy out": "out", "copy in": "in", "hash": "hash", "hash and copy out": "both"}
FIRST_CHUNK_MS = 3


def measure_parts(build: Path, size: int, rounds: int, chunk: int = 64 * MIB, *, fake: bool = False) -> list[Cell]:
    """A cell for each part, of `size` bytes in chunks of `chunk`."""
    environment = dict(os.environ)
    if fake:
        environment |= {"LD_LIBRARY_PATH": str(build / "lib" / "fake_driver"), "FAKE_CUDA_MEMORY_BYTES": str(2 * size)}
    done = subprocess.run([build / "bin" / "sluice-bench-parking", "--bytes", str(size), "--chunk-bytes", str(chunk),
                           "--rounds", str(rounds)], capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"parking: status {done.returncode}: {done.stderr.strip()}")
    each = [json.loads(line) for line in done.stdout.splitlines()]
    return [cell(part, key, size, chunk, each) for part, key in PARTS.items()]


def cell(part: str, key: str, size: int, chunk: int, rounds: Sequence[dict]) -> Cell:
    """One part of all rounds."""
    metrics = {"time_ratio": single(statistics.median(one[key] / one["plain"] for one in rounds), PLAIN),
               "time_ms": distribution(one[key] for one in rounds),
               "moved_bytes_per_s": single(statistics.median(1000 * size / one[key] for one in rounds))}
    targets = {}
    if f"{key}_first" in rounds[0]:
        metrics["first_chunk_ms"] = distribution(one[f"{key}_first"] for one in rounds)
        targets["first_chunk_ms.p50"] = f"<= {FIRST_CHUNK_MS}"
    return Cell({"part": part, "size_mib": size // MIB, "chunk_mib": chunk // MIB}, metrics, targets)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", action="store_true", required=True)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="release")
    parser.add_argument("--fake", action="store_true")
    chosen = parser.parse_args()
    folder = ROOT / "build" / chosen.preset
    write("parking", measure_parts(folder, int(chosen.gib * GIB), chosen.rounds, fake=chosen.fake),
          gpus=0 if chosen.fake else 1, folder=folder / "results" if chosen.fake else RESULTS)
