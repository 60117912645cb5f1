"""What parking is made of, on a GPU: copies through the ring against one plain copy of the same bytes, and the hash.

`--parts` is all there is so far: no process is parked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess

from records import ROOT, Cell, distribution, single, write

GIB = 1 << 30
PLAIN = "one plain copy out of the same bytes, same run"


def measure_parts(gib: int, rounds: int, preset: str) -> Cell:
    """One cell of `gib` GiB of device memory."""
    done = subprocess.run([ROOT / "build" / preset / "bin" / "sluice-bench-parking", "--gib", str(gib), "--rounds", str(rounds)],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"parking: {done.stderr.strip()}")
    each = [json.loads(line) for line in done.stdout.splitlines()]
    ratio = {way: statistics.median(one[f"{way}_ms"] / one["plain_ms"] for one in each) for way in ("out", "in")}
    rate = statistics.median(gib * GIB / (one["hash_ms"] / 1000) for one in each)
    return Cell({"size_gib": gib, "part": "ring and hash"},
                {"out_ratio": single(ratio["out"], PLAIN), "in_ratio": single(ratio["in"], PLAIN),
                 "first_chunk_ms": distribution([one["first_ms"] for one in each]),
                 "hash_bytes_per_s": single(rate), "plain_ms": distribution([one["plain_ms"] for one in each])})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", action="store_true", required=True)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="release")
    chosen = parser.parse_args()
    write("parking", [measure_parts(chosen.gib, chosen.rounds, chosen.preset)], gpus=1)
