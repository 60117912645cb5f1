"""Launches of models that are recorded as CUDA graphs: the same answers, bit by bit, as without."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

from patience import eventually  # noqa: E402
from server_gpu_test import GpuWorld  # noqa: E402
from server_models import Counting, TinyNet  # noqa: E402
from serving import Server, floats  # noqa: E402

RECORDED = "optimization { cuda { graphs: true } }"
IMAGES = {"inputs": {"image": ("TYPE_FP32", [1, 8, 8])}, "outputs": {"logits": ("TYPE_FP32", [10]), "best": ("TYPE_INT64", [])}}
VECTORS = {"inputs": {"x": ("TYPE_FP32", [3])}, "outputs": {"y": ("TYPE_FP32", [3])}}
#: More than it takes on each of a server's threads.
OFTEN = 24


class Choosing(torch.nn.Module):
    """What it does depends on numbers on the device, which it waits for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 if bool(x.sum() > 0) else x * 3.0


class Random(torch.nn.Module):
    """Takes numbers of the device's generator, whose state a recording would repeat."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Attending(torch.nn.Module):
    """What a transformer is made of, with dropout that evaluation turns off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.into, self.out = torch.nn.Linear(3, 32), torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.into(x).unsqueeze(1))).squeeze(1)


@pytest.fixture
def world(sluice, tmp_path):
    made = GpuWorld(sluice, tmp_path)
    yield made
    made.end()


def is_recorded(server: Server, model: str) -> bool:
    return f"launches of a model are recorded as CUDA graphs model={model}" in server.log()


@pytest.mark.parametrize(("module", "specs", "shape"), [(TinyNet, IMAGES, [1, 8, 8]), (Attending, VECTORS, [3])])
def test_answers_are_those_of_single_launches(world, module, specs, shape):
    for name, more in (("plain", ""), ("recorded", RECORDED + " instance_group { count: 2 }")):
        torch.manual_seed(1)
        world.models.add(name, module(), **specs, more=more)
    server = world.serve(world.policy("plain", "recorded"))
    name = next(iter(specs["inputs"]))
    generator = torch.Generator().manual_seed(5)
    wrong: list[object] = []

    def ask(samples: int) -> None:
        for _ in range(OFTEN):
            x = floats(name, torch.randn([samples, *shape], generator=generator))
            once, again = (server.outputs(model, [x]) for model in ("plain", "recorded"))
            if any(not torch.equal(one, other) for one, other in zip(once, again, strict=True)):
                wrong.append((samples, once, again))

    for samples in (1, 3, 8):
        ask(samples)
    clients = [threading.Thread(target=ask, args=[samples]) for samples in (1, 2, 3, 8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert not wrong
    assert is_recorded(server, "recorded") and not is_recorded(server, "plain")
    assert "not recorded" not in server.log()


def test_a_recorded_model_comes_back_after_it_has_gone_cold(world):
    model = world.models.add("recorded", TinyNet(), **IMAGES, more=RECORDED)
    server = world.serve(world.policy("recorded", idle="1s"))
    x = torch.randn([2, 1, 8, 8], generator=torch.Generator().manual_seed(2))
    first = server.outputs("recorded", [floats("image", x)])[0]
    torch.testing.assert_close(first, model(x)[0], rtol=1e-3, atol=1e-3)
    kept = []
    for round_ in range(1, 4):
        for _ in range(OFTEN):
            assert torch.equal(server.outputs("recorded", [floats("image", x)])[0], first)
        eventually(lambda: server.model("recorded")["state"] == "cold", "it goes cold")
        assert server.model("recorded")["cold_starts"] == round_
        kept.append(world.pool()["serving_bytes"])
    assert len(set(kept)) == 1, "what it has recorded goes with it"
    assert is_recorded(server, "recorded")


@pytest.mark.parametrize(("module", "why"), [
    (Choosing, "not recorded as CUDA graphs model=model"), (Counting, "it may write into 'count'"), (Random, "not recorded as CUDA graphs")])
def test_what_launches_alone_do_not_repeat_is_computed_as_ever(world, module, why):
    world.models.add("model", module(), **VECTORS, more=RECORDED + " instance_group { count: 2 }")
    server = world.serve(world.policy("model"))
    seen = []
    for i in range(OFTEN):
        x = torch.full([1, 3], float(-1) ** i)
        seen.append(server.outputs("model", [floats("x", x)])[0])
        wanted = {Choosing: x * (2.0 if i % 2 == 0 else 3.0), Counting: x + 1.0}.get(module)
        assert wanted is None or torch.equal(seen[-1], wanted)
    assert module is not Random or len({tuple(each.flatten().tolist()) for each in seen}) == OFTEN
    assert why in server.log()
    assert not is_recorded(server, "model")
