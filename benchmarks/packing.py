"""How well models are packed into the chunks of a pool that is nearly full, and what that costs.

200 models of 45 MiB to 6 GiB come and go in a pool of 141 GB with 64 MiB chunks: placed tensor by tensor as the server
does, as one contiguous range of whole chunks each, and tensor by tensor in the smallest free range of the whole view.
Only the decisions are made, so that no GPU is needed. packing.cpp says how a load is chosen and what counts as waste.
"""

from __future__ import annotations

import argparse
import json
import subprocess

from records import ROOT, Cell, distribution, single, write

#: Packer → what it is called in the record, and the occupancies it is measured at.
PACKERS = {
    "tensors": ("tensor placement", (95, 98, 99)),
    "models": ("whole chunks for each model", (95, 98)),
    "heap": ("best fit over one range", (95,)),
}
TARGETS = {("tensors", 95): {"waste_percent.max": "<= 4", "refused.value": "<= 0"}}


def measure(packer: str, occupancy: int, operations: int, preset: str) -> dict:
    """Metrics of `operations` loads and unloads with live tensors in up to `occupancy` percent of the pool."""
    done = subprocess.run(
        [ROOT / "build" / preset / "bin" / "sluice-bench-packing", "--packer", packer, "--occupancy-percent",
         str(occupancy), "--operations", str(operations)],
        capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    said = json.loads(done.stdout)
    loads = said["loads"]
    return {
        "waste_percent": distribution(said["waste_percent"]),
        "hole_percent": distribution(said["hole_percent"]),
        "live_percent": distribution(said["occupancy_percent"]),
        "refused": single(said["refused"]),
        "stitched_ranges": distribution(said["stitched_ranges"]),
        "stitched_chunks": distribution(said["stitched_chunks"]),
        "stitched_chunks_mean": single(sum(said["stitched_chunks"]) / loads),
        "unstitched_loads_percent": single(100 * said["stitched_ranges"].count(0) / loads),
        "touched_chunks": distribution(said["touched_chunks"]),
        "kept_chunks": distribution(said["kept_chunks"]),
        "returned_percent": single(said["returned_percent"]),
        "load_us": distribution(said["load_us"]),
        "unload_us": distribution(said["unload_us"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    cells = []
    for packer, (name, occupancies) in PACKERS.items():
        for occupancy in occupancies:
            metrics = measure(packer, occupancy, args.operations, args.preset)
            cells.append(Cell({"packer": name, "occupancy_percent": occupancy, "operations": args.operations}, metrics,
                              TARGETS.get((packer, occupancy), {})))
    write("packing", cells, notes=[
        "percentages are of the pool. waste: free bytes of serving chunks that tensors of the next loads were refused, "
        "tried on a copy of the state; hole: all free bytes of serving chunks; returned: whole chunks that a model left "
        "behind, as a share of its bytes; kept: chunks of a model that others kept partially live when it went. "
        "refused: loads that did not fit although the pool had enough free bytes; each was tried again after one more "
        "model had gone. The best fit over one range is not held to whole chunks, so its holes are those between tensors."])


if __name__ == "__main__":
    main()
