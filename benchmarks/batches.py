"""What the server adds to a model's own time, and what its batches are worth, on a GPU: cells of the record `serving`.

    ./benchmarks/run.sh batches [--seconds 4] [--rounds 3]
    ./benchmarks/run.sh batches --backend host --seconds 1      # tries it without a GPU, with a small model

A ResNet-50 in half precision takes images of 3x224x224 in bytes, which it scales itself; requests have one image each, as a binary
tensor. `served_added_us` is the median latency of requests one after the other, less that of direct calls of the same model in
a process of its own, from a tensor on the host to one on the host. `saturation_ratio` is the rate at which so many connections are
answered without a pause, over what a loop by hand reaches that computes batches of one size out of memory that the GPU can read by
itself. `light_load_ratio` compares medians of latencies at 30 % of the rate that is reached without batches: with them, over without.
Requests arrive by a Poisson process then, the same one for both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from endpoint import Server, add_model, environment_of
from records import Cell, single, write
from serving import BIN, Load, post

from demonstration.processes import Failed, has_cuda

SHAPE = {"cuda": [3, 224, 224], "host": [3, 32, 32]}
BATCH = {"cuda": 32, "host": 8}
CONNECTIONS = {"cuda": 128, "host": 16}
POOL = {"cuda": "8GiB", "host": "256MiB"}
LIGHT_LOAD = 0.3
#: How long a batch may wait for more.
DELAY_US = 100
WARM_UP = 20
#: What the names of models with other launches end with.
LAUNCHES = {"one by one": "", "recorded": "_recorded"}
#: How they are configured. Recorded: launches are CUDA graphs, and three computations at once keep the device at work.
BATCHES = f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}\n"
RECORDED = "optimization { cuda { graphs: true } }\n"
MODELS = {"single": "", "batched": BATCHES, "single_recorded": RECORDED,
          "batched_recorded": BATCHES + RECORDED + "instance_group { count: 3 }\n"}


def make_model(backend: str):
    import torch

    def network() -> torch.nn.Module:
        if backend == "cuda":
            import torchvision
            return torchvision.models.resnet50().half().to(memory_format=torch.channels_last)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                                   torch.nn.Linear(32, 1000))

    class OfBytes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.is_half = backend == "cuda"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x.half() if self.is_half else x.float()
            return self.network((scaled / 255.0).contiguous(memory_format=torch.channels_last)).float()

    torch.manual_seed(0)
    module = OfBytes().eval()
    with torch.no_grad():  # on the host, where half precision may be missing
        return torch.jit.script(module)


def add_models(repository: Path, backend: str) -> None:
    model = make_model(backend)
    for name, more in MODELS.items():
        add_model(repository, name, model, {"x": ("TYPE_UINT8", SHAPE[backend])}, {"y": ("TYPE_FP32", [1000])}, max_batch=BATCH[backend])
        with (repository / name / "config.pbtxt").open("a", encoding="utf-8") as config:
            config.write(more)


@contextlib.contextmanager
def serving(folder: Path, backend: str) -> Iterator[int]:
    policy = folder / "policy.yaml"
    policy.write_text(f"version: 1\nserver: {{model_repository: {folder / 'models'}, threads: 4}}\n"
                      f"pool: {{backend: {backend}, memory: {POOL[backend]}}}\nmodels:\n"
                      + "".join(f"  - {{name: {name}, slo: {{latency: 5s}}, max_queue: 1024}}\n" for name in MODELS),
                      encoding="utf-8")
    server = Server(BIN / "sluice", policy, environment_of(folder / "run", SLUICE_LOG="warn"))
    try:
        yield server.listen().address[1]
    finally:
        server.end()
        with contextlib.suppress(ConnectionRefusedError):  # it goes by itself when nobody needs it
            end_broker(folder / "run")


def request_of(model: str, backend: str) -> bytes:
    import torch

    shape = SHAPE[backend]
    raw = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy().tobytes()
    head = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1, *shape],
                                   "parameters": {"binary_data_size": len(raw)}}],
                       "parameters": {"binary_data_output": True}}).encode()
    return post(f"/v2/models/{model}/infer", head + raw, Inference_Header_Content_Length=len(head))


def compute_by_hand(file: str, backend: str, seconds: float) -> dict[str, float]:
    """The median of direct calls in microseconds, and the rate of images of a loop over batches."""
    import torch

    device = torch.device(backend if backend == "cuda" else "cpu")
    model = torch.jit.load(file, map_location=device)
    one = torch.zeros([1, *SHAPE[backend]], dtype=torch.uint8)
    many = torch.zeros([BATCH[backend], *SHAPE[backend]], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def timed(x: torch.Tensor) -> float:
        began = time.perf_counter()
        model(x.to(device, non_blocking=True)).cpu()
        return time.perf_counter() - began

    with torch.inference_mode():
        for x in (one, many):
            for _ in range(WARM_UP):
                timed(x)
        alone, ends = [], time.perf_counter() + seconds
        while time.perf_counter() < ends:
            alone.append(timed(one))
        images, began = 0, time.perf_counter()
        waits: list[torch.Tensor] = []
        while (now := time.perf_counter()) < began + seconds:  # the next batch is begun before this one is done
            waits.append(model(many.to(device, non_blocking=True)))
            if len(waits) > 1:
                waits.pop(0).cpu()
            images += len(many)
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
    return {"direct_us": statistics.median(alone) * 1e6, "images_per_s": images / (now - began)}


def by_hand(folder: Path, backend: str, seconds: float) -> dict[str, float]:
    """In a process of its own, whose memory is gone afterwards."""
    done = subprocess.run([sys.executable, __file__, "--by-hand", folder / "models" / "single" / "1" / "model.pt", "--backend", backend,
                           "--seconds", str(seconds)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, port: int, backend: str, seconds: float, rounds: int) -> list[Cell]:
    load = Load(folder, seconds)
    requests = {name: request_of(name, backend) for name in MODELS}
    connections = CONNECTIONS[backend]
    seen: dict[tuple[str, str], list[float]] = {}

    def note(launches: str, name: str, value: float) -> float:
        seen.setdefault((launches, name), []).append(value)
        return value

    for each in requests.values():  # what is recorded is, afterwards, by each thread and for most sizes of batches
        for count in (1, connections, connections):
            load(each, port, count)
    for _ in range(rounds):
        hand = by_hand(folder, backend, seconds / 2)
        for launches, suffix in LAUNCHES.items():
            single_request, batched = (requests[f"{kind}{suffix}"] for kind in ("single", "batched"))
            alone = load(single_request, port, 1)["latency_us"]["p50"]
            note(launches, "added", alone - note(launches, "direct", hand["direct_us"]))
            full = load(batched, port, connections)
            note(launches, "saturation", note(launches, "rate", full["rate_per_s"]) / note(launches, "by_hand", hand["images_per_s"]))
            unbatched = load(single_request, port, connections)["rate_per_s"]
            rate = LIGHT_LOAD * note(launches, "unbatched", unbatched)
            light = [load(each, port, connections, rate)["latency_us"] for each in (batched, single_request)]
            note(launches, "light", light[0]["p50"] / light[1]["p50"])
            note(launches, "light_us", light[0]["p50"])
    model = "resnet50" if backend == "cuda" else "small convolution"
    return [cell for launches in LAUNCHES for cell in cells_of(
        {"model": model, "format": "binary", "launches": launches, "delay_us": DELAY_US, "system": "sluice"}, backend,
        {name: statistics.median(values) for (whose, name), values in seen.items() if whose == launches})]


def cells_of(params: dict[str, object], backend: str, median: dict[str, float]) -> list[Cell]:
    return [
        Cell({**params, "connections": 1}, {"served_added_us": single(median["added"], "direct calls, same run"),
                                            "direct_us": single(median["direct"])}, {"served_added_us.value": "<= 300"}),
        Cell({**params, "connections": CONNECTIONS[backend], "batch": BATCH[backend]},
             {"saturation_ratio": single(median["saturation"], "a loop by hand over batches, same run"),
              "rate_per_s": single(median["rate"]), "by_hand_per_s": single(median["by_hand"]),
              "unbatched_per_s": single(median["unbatched"])}, {"saturation_ratio.value": ">= 0.95"}),
        Cell({**params, "load_percent": round(100 * LIGHT_LOAD), "batch": BATCH[backend]},
             {"light_load_ratio": single(median["light"], "without batches, same run"), "p50_us": single(median["light_us"])},
             {"light_load_ratio.value": "<= 1.1"})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--by-hand", help=argparse.SUPPRESS)
    args = parser.parse_args()
    backend = args.backend or ("cuda" if has_cuda() else "host")
    if args.by_hand:
        print(json.dumps(compute_by_hand(args.by_hand, backend, args.seconds)))
        return
    clear_up_on_sigterm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        add_models(folder / "models", backend)
        with serving(folder, backend) as port:
            cells = measure(folder, port, backend, args.seconds, args.rounds)
        if backend == "cuda":
            write("serving", cells, gpus=1, accumulate=True)
        else:  # the host's record is of other models
            write("batches", cells, folder=folder)


if __name__ == "__main__":
    main()
