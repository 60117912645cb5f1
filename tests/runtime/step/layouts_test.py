"""A model that is laid out over several processes, in shards (`fully_shard`), in parts of tensors (`parallelize_module`), or both,
learns what one process learns that has all the samples, however often it is disturbed.
"""

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

import gloo_processes  # noqa: E402
from layouts import EVERY, LAYOUTS, disturbed, model, trained  # noqa: E402
from scripted_runtime import PatientRuntime, sharing  # noqa: E402

import sluice  # noqa: E402

PARTS = ((6, 6, 3, 3), (8, 5, 3, 7))  # samples of each process, or of several that have the same


def same_as_one(rank: int, layout: str) -> None:
    processes, copies = LAYOUTS[layout]
    clip = {"clip_norm": 1.0} if copies == 1 else {}  # torch's clipping wants all parameters to be laid out alike
    for parts in PARTS:
        parts = parts[:processes // copies]
        count, at = sum(parts), rank // copies
        part = slice(sum(parts[:at]), sum(parts[:at + 1]))
        size = -(-parts[at] // 3)  # three slices in each
        for way in ("mean", "weights", "sum"):
            mine, losses = trained(model(layout), part, count, way, size, **clip)
            one, expected = trained(model(None), slice(0, count), count, way, **clip)
            assert losses == pytest.approx(expected, rel=1e-12), (way, parts)
            for param, wanted in zip(mine, one, strict=True):
                torch.testing.assert_close(param, wanted, rtol=1e-11, atol=1e-13)


def left_anywhere(rank: int, layout: str) -> None:
    """Left at any operator of forward and backward, and of torch's hooks in them, by an exception or at its end."""
    processes, copies = LAYOUTS[layout]
    at = rank // copies
    part = slice(4 * at, 4 * at + 4)
    count = 4 * processes // copies
    every = EVERY * (5 if processes > 2 else 1)
    with disturbed(None) as undisturbed:
        weights, losses = trained(model(layout), part, count, size=None, steps=2)
    assert undisturbed.together and undisturbed.operators > 100
    for silently in (False, True):
        for operator in range(0, undisturbed.operators + every, every):
            with disturbed(operator, silently) as runtime:
                mine, its = trained(model(layout), part, count, size=None, steps=2)
            assert runtime.discards == 2, operator
            assert its == losses, (operator, silently)
            assert all(torch.equal(*pair) for pair in zip(mine, weights, strict=True)), (operator, silently)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("body", [same_as_one, left_anywhere], ids=lambda body: body.__name__)
def test_in_processes_that_train_together(tmp_path, body, layout):
    gloo_processes.run(tmp_path, (functools.partial(body, layout=layout),), LAYOUTS[layout][0])


def refused_in_some_processes(rank: int) -> None:
    """Of four, two of which train together in a grid with nobody."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).double()
    parallelize_module(module[0], mesh["data"], ColwiseParallel())
    parallelize_module(module[1], mesh["parts"], RowwiseParallel())
    with pytest.raises(sluice.SluiceError, match="a mesh of all 4 processes of the job, but the largest has 2"):
        sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1))


def refused(rank: int) -> None:
    module = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ColwiseParallel())
    with pytest.raises(sluice.SluiceError, match="with tensor parallelism .* leave adapt out"):
        sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1), adapt=True)
    with sharing(PatientRuntime() if rank == 0 else None), pytest.raises(sluice.SluiceError, match="all under one `sluice run`"):
        sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    beside = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), module)
    with pytest.raises(sluice.SluiceError, match="in DistributedDataParallel or have layers in parts, not both; .* fully_shard"):
        sluice.Step(beside, torch.optim.SGD(beside.parameters(), lr=0.1))


@pytest.mark.parametrize(("body", "ranks"), [(refused, 2), (refused_in_some_processes, 4)], ids=["two", "four"])
def test_what_cannot_be_kept_together_is_refused(tmp_path, body, ranks):
    gloo_processes.run(tmp_path, (body,), ranks)
