"""What README shows, by an installed Sluice alone: trains in a pool while a server answers, which takes its memory from training.

    env/bin/python installed_job.py [SLUICE]

Uses the `sluice` beside its interpreter, or the one that is named, and nothing of a checkout, nor packages other than torch. Prints
what happened; the exit status is 0 only if the model answered rightly out of memory that training gave up, and training went on.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch

TRAINING = """
import sys, torch, sluice
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = sluice.Step(model, optimizer, micro_batch=1024)
x, y = torch.randn(2048, 64), torch.randint(10, (2048,))
first = float(step(lambda x, y: F.cross_entropy(model(x), y), x, y))
print(f"shared {step.shared}", flush=True)
for line in sys.stdin:  # a step for each, until the end
    loss = float(step(lambda x, y: F.cross_entropy(model(x), y), x, y))
    print(loss, flush=True)
assert loss < first, (loss, first)
"""

POLICY = """
version: 1
server: {{model_repository: {repository}}}
pool: {{backend: host, memory: 64MiB}}
models:
  - name: table
    slo: {{percentile: 95%, latency: 2s, attainment: 95%, window: 1m}}
"""

CONFIG = """
name: "table"
backend: "pytorch"
input [ { name: "at" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "value" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


class Table(torch.nn.Module):
    """40 MiB, of which an answer is one number: wrong memory is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.arange(10 * 2**20, dtype=torch.float32))

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.numbers[at]


def answer(url: str, at: int) -> float:
    body = {"inputs": [{"name": "at", "shape": [1], "datatype": "INT64", "data": [at]}]}
    with urllib.request.urlopen(f"{url}/v2/models/table/infer", data=json.dumps(body).encode(), timeout=60) as told:
        return json.load(told)["outputs"][0]["data"][0]


def train(training: subprocess.Popen) -> str:
    training.stdin.write("step\n")
    training.stdin.flush()
    return training.stdout.readline()


def main() -> None:
    # Not resolved: an environment's interpreter is a link.
    sluice = Path(sys.argv[1] if len(sys.argv) > 1 else Path(sys.executable).with_name("sluice"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "models" / "table" / "1"
        model.mkdir(parents=True)
        torch.jit.script(Table()).save(str(model / "model.pt"))
        model.with_name("config.pbtxt").write_text(CONFIG)
        policy = folder / "policy.yaml"
        policy.write_text(POLICY.format(repository=folder / "models"))
        run = folder / "run"
        run.mkdir(mode=0o700)
        environment = {**os.environ, "SLUICE_RUNTIME_DIR": str(run)}
        training = subprocess.Popen([sluice, "run", "--backend", "host", "--memory", "64MiB", "--require-pool", "--",
                                     sys.executable, "-c", TRAINING], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server = subprocess.Popen([sluice, "serve", "--policy", policy, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert training.stdout.readline() == "shared True\n"
            said = server.stdout.readline()
            url = re.fullmatch(r"listening on (http://\S+)\n", said)
            assert url, said
            for at in (0, 5, 10 * 2**20 - 1):
                assert answer(url[1], at) == at
                assert train(training)
            with urllib.request.urlopen(f"{url[1]}/v2/sluice/status", timeout=60) as told:
                reclaimed = [handover["bytes_reclaimed"] for handover in json.load(told)["handovers"]]
            assert max(reclaimed) > 0, reclaimed
            training.stdin.close()
            assert training.wait(60) == 0
            server.terminate()
            assert server.wait(60) == 0
        finally:
            for process in (training, server):
                process.kill()
                process.wait()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}: trained in the pool, which gave "
          f"{max(reclaimed) >> 20} MiB to the server")


if __name__ == "__main__":
    main()
