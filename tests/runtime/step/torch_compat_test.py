"""What Sluice uses of torch beyond its public interface is there, and where it is not, one feature is refused by name."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
torch = pytest.importorskip("torch")

from torch import distributed, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from sluice import SluiceError, _optimizers, _torch_compat  # noqa: E402
from sluice._torch_compat import FEATURES, Feature  # noqa: E402

#: What only a torch with CUDA has.
OF_GPUS = {"gpu", "communicator"}


def forget() -> None:
    _torch_compat.need.cache_clear()
    _torch_compat.has.cache_clear()


@pytest.fixture
def lacking(monkeypatch):
    """Makes this torch lack a name, given as FEATURES has it."""
    def lack(name: str) -> None:
        is_there = _torch_compat._is_there
        monkeypatch.setattr(_torch_compat, "_is_there", lambda each: each != name and is_there(each))
        forget()

    yield lack
    forget()


@pytest.mark.parametrize("feature", FEATURES)
def test_this_torch_has_all_names(feature):
    if feature in OF_GPUS and torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    _torch_compat.need(feature)
    assert _torch_compat.has(feature)


@pytest.mark.parametrize("feature", [name for name, feature in FEATURES.items() if feature.names])
def test_a_name_that_is_missing_is_told_with_what_needs_it(feature, lacking):
    name = FEATURES[feature].names[-1]
    lacking(name)
    with pytest.raises(SluiceError) as refusal:
        _torch_compat.need(feature)
    assert str(refusal.value).startswith(f"{FEATURES[feature].what} needs what torch {torch.__version__} does not have: ")
    assert name.replace(":", ".") in str(refusal.value)
    for other in FEATURES.keys() - OF_GPUS:
        if name not in FEATURES[other].names:
            _torch_compat.need(other)


def test_modules_and_classes_that_are_not_there_are_names_that_are_missing(monkeypatch):
    names = ("torch.no_such_module:thing", "torch:NoSuchClass.thing", "torch.ops:aten.no_such_operator")
    monkeypatch.setitem(FEATURES, "something", Feature("something", names))
    with pytest.raises(SluiceError, match=r"torch\.no_such_module\.thing, torch\.NoSuchClass\.thing, torch\.ops\.aten\.no_such_op"):
        _torch_compat.need("something")


def test_so_are_attributes_that_objects_do_not_have():
    class Wrapper:
        _comm_hooks = ()

    with pytest.raises(SluiceError, match=r"DistributedDataParallel needs .*: Wrapper\._delay_all_reduce_params, Wrapper\._join_config"):
        _torch_compat.need_of("replicas", wrapper=Wrapper())


@pytest.fixture
def alone(tmp_path):
    """This process is a group by itself."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("place", ["_comm_ctx", "_state_ctx", "group"])
def test_shards_of_which_torch_keeps_more_than_is_known_are_refused_before_they_are_trained(place, alone):
    module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    state = module._get_fsdp_state()
    kept = _torch_compat.FullySharded([module])._groups[0] if place == "group" else getattr(state, place)
    kept.something_new = True
    with pytest.raises(SluiceError, match=rf"torch {re.escape(torch.__version__)} keeps {type(kept).__name__}\.something_new"):
        _torch_compat.FullySharded([module])


def test_what_torch_begins_to_keep_in_a_first_pass_is_refused_when_that_is_taken_back(alone):
    module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    sharded = _torch_compat.FullySharded([module])
    module(torch.ones(2, 2)).sum().backward()
    module._get_fsdp_state()._comm_ctx.something_new = True
    with pytest.raises(SluiceError, match="something_new"):
        sharded.reset()


def test_an_optimizer_of_which_nothing_is_known_is_not_taken_back(lacking):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert _optimizers.can_be_taken_back(optimizer)
    lacking("torch.optim.optimizer:_global_optimizer_post_hooks")
    assert not _optimizers.can_be_taken_back(optimizer)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_documentation_says_what_is_lost_without_a_name(feature):
    rows = (Path(__file__).resolve().parents[3] / "docs" / "pytorch.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in rows if re.search(rf"\| {re.escape(FEATURES[feature].what)}(:[^|]*)? \|$", row)]
    for name in FEATURES[feature].names:
        assert name.rpartition(":")[2].rpartition(".")[2] in row, name
