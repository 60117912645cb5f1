"""What a step cannot do is refused with a sentence that names what would be right."""

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402

import sluice  # noqa: E402
from sluice import _checks, _runtime  # noqa: E402
from sluice._engine import Engine  # noqa: E402


def made(runtime=None, model=None, micro_batch=2, optimizer=torch.optim.SGD, **options):
    model = model or nn.Linear(3, 2)
    with sharing(runtime):
        return sluice.Step(model, optimizer(model.parameters(), lr=0.1), micro_batch, **options)


def loss_of(step):
    return lambda x: step.model(x).square().mean()


X = torch.ones(4, 3)


@pytest.mark.parametrize("options, kind, told", [
    ({"micro_batch": 0}, ValueError, "at least 1, not 0"),
    ({"micro_batch": 2.5}, TypeError, "whole number of samples"),
    ({"reduction": "none"}, ValueError, '"mean" or "sum"'),
    ({"clip_norm": 0}, ValueError, "more than 0"),
    ({"clip_norm": "1"}, TypeError, "must be a number, not str"),
    ({"scaler": 1024.0}, TypeError, "torch.amp.GradScaler, not float"),
    ({"generators": 3}, TypeError, "sequence of random generators"),
    ({"generators": [3]}, TypeError, "int is no random generator"),
    ({"generators": [random.SystemRandom()]}, TypeError, "SystemRandom is no random generator"),
    ({"optimizer": torch.optim.LBFGS, "scaler": torch.amp.GradScaler("cpu")}, ValueError, "cannot be used with"),
])
def test_a_wrong_argument_is_named(options, kind, told):
    with pytest.raises(kind, match=told):
        made(**options)


def test_a_model_without_shapes_is_to_be_run_first():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(sluice.SluiceError, match=r"0\.weight of the model is not initialized yet.* run the model once"):
        made(model=model, optimizer=lambda parameters, lr: torch.optim.SGD(list(parameters), lr))
    model(X)
    made(model=model)(lambda x: model(x).sum(), X)


def test_a_model_of_which_parameters_become_of_another_type_is_trained_on():
    results = []
    for runtime in (None, ScriptedRuntime()):
        torch.manual_seed(0)
        with sharing(runtime):
            model = nn.Linear(3, 2)
            step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
            step(loss_of(step), X)
            model.double()
            step(loss_of(step), X.double())
        results.append(list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True)) and results[0][0].dtype == torch.double


def test_model_and_optimizer_are_told_apart():
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not SGD"):
        sluice.Step(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, not Linear"):
        sluice.Step(model, model)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        made(model=nn.Linear(3, 2).requires_grad_(False))


@pytest.mark.parametrize("batch, told", [
    ((), "at least one tensor"), ((torch.ones(0, 3),), "at least one sample"), ((X, torch.ones(5)), "agree in dimension 0"),
])
def test_a_batch_without_samples_or_with_different_ones_is_refused(batch, told):
    with pytest.raises(ValueError, match=told):
        made()(lambda *_: None, *batch)


@pytest.mark.parametrize("result, kind, told", [
    (lambda loss: None, TypeError, "not NoneType"),
    (lambda loss: loss.item(), TypeError, "not float"),
    (lambda loss: loss.expand(2), TypeError, r"not a tensor of shape \[2\]"),
    (lambda loss: (loss, 1, 2), TypeError, "not 3 values"),
    (lambda loss: (loss, "1"), TypeError, "weight of a slice must be a number"),
    (lambda loss: (loss, -1), ValueError, "not negative, but is -1"),
    (lambda loss: (loss, float("nan")), ValueError, "finite"),
    (lambda loss: (loss, 0), ValueError, "must not all be zero"),
])
@pytest.mark.parametrize("runtime", [None, ScriptedRuntime()], ids=["plain", "shared"])
def test_a_loss_function_that_returns_something_else_is_told_so(result, kind, told, runtime):
    step = made(runtime)
    with pytest.raises(kind, match=told):
        step(lambda x: result(loss_of(step)(x)), X)


@pytest.mark.parametrize("runtime", [None, ScriptedRuntime(), ScriptedRuntime(5)], ids=["plain", "shared", "disturbed"])
def test_backward_is_the_steps_own(runtime):
    step = made(runtime)
    before = step.model.weight.clone()
    carried = []

    def with_backward(x, result=lambda loss: loss):
        loss = loss_of(step)(x)
        loss.backward()
        return result(loss)

    def with_history(x):
        carried.append(step.model(x).square())
        return carried[0].mean()

    for loss_fn in (with_backward, lambda x: (with_backward(x), 1.0), with_history):
        with pytest.raises(sluice.SluiceError, match=r"leave .backward\(\) out of the loss function"):
            step(loss_fn, X)
            step(loss_fn, X)
    carried.clear()

    def with_kept_graph(x):
        loss = loss_of(step)(x)
        loss.backward(retain_graph=True)
        return loss

    def with_kept_graph_and_weight(x):
        return with_kept_graph(x), 3.0

    for loss_fn in (with_kept_graph, with_kept_graph_and_weight):
        with pytest.raises(sluice.SluiceError, match=r"leave .backward\(\) out of the loss function"):
            step(loss_fn, X)
    for loss_fn in (lambda x: with_backward(x, torch.Tensor.detach), torch.no_grad()(loss_of(step)), lambda x: x.mean()):
        with pytest.raises(sluice.SluiceError, match="the loss of a slice has no gradient.*runs backward itself"):
            step(loss_fn, X)
    with pytest.raises(sluice.SluiceError, match="leave .backward"):
        for micro in step.micro_batches(X):
            with micro as x:
                micro.backward(with_backward(x))
    with pytest.raises(sluice.SluiceError, match="leave .backward"):
        for micro in step.micro_batches(X):
            with micro as x:
                micro.backward(with_kept_graph(x))
    assert torch.equal(before, step.model.weight) and step.model.weight.grad is None
    step(loss_of(step), X)
    assert step.stats()["steps"] == 1


def test_weights_belong_to_all_slices_and_to_means():
    step = made()
    weights = iter([1, None])
    with pytest.raises(ValueError, match="every slice of a batch brings a weight, or none"):
        step(lambda x: (loss_of(step)(x), next(weights)), X)
    step = made(reduction="sum")
    with pytest.raises(ValueError, match="weights belong to means"):
        step(lambda x: (loss_of(step)(x), 1), X)


def test_the_step_goes_on_after_an_error():
    for runtime in (None, ScriptedRuntime(), ScriptedRuntime(5)):
        step = made(runtime)
        before = [param.clone() for param in step.model.parameters()]
        with pytest.raises(ZeroDivisionError):
            step(lambda x: 1 / 0, X)
        with pytest.raises(KeyboardInterrupt):
            step(lambda x: (_ for _ in ()).throw(KeyboardInterrupt), X)
        assert all(map(torch.equal, before, step.model.parameters())) and step.stats()["steps"] == 0
        step(loss_of(step), X)
        assert not any(map(torch.equal, before, step.model.parameters()))


@pytest.mark.parametrize("runtime", [None, ScriptedRuntime()], ids=["plain", "shared"])
def test_an_optimizer_inside_of_backward_is_refused(runtime):
    step = made(runtime)
    weight = step.model.weight
    own = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: own.step())
    before = weight.clone()
    with pytest.raises(sluice.SluiceError, match="SGD.step was called inside of a micro-batch"):
        step(loss_of(step), X)
    assert torch.equal(before, weight)


def test_a_hook_that_leaves_optimizers_alone_is_none_of_ours():
    step = made(ScriptedRuntime())
    seen = []
    step.model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.shape))
    step(loss_of(step), X)
    assert len(seen) >= 2


def test_tensors_that_leak_out_of_a_discarded_slice_are_an_error():
    step = made(ScriptedRuntime(AT_COMMIT))
    leaked = []
    with pytest.raises(sluice.Survivors, match="still referenced"):
        step(lambda x: leaked.append(step.model(x)) or leaked[-1].square().mean(), X)


class Besieged(ScriptedRuntime):
    """Loses the memory of so many micro-batches, one after the other."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    def commit_begin(self, may_defer: bool) -> int:
        if self._times > 0:
            self._times -= 1
            self._revoke()
        return super().commit_begin(may_defer)


@pytest.mark.parametrize("times, words", [(31, 0), (40, 1), (130, 3)])
def test_training_that_gets_nowhere_says_so_more_and_more_seldom(times, words, capfd):
    step = made(Besieged(times))
    step(loss_of(step), X)
    step(loss_of(step), X)
    assert step.stats()["discards"] == times
    assert capfd.readouterr().err.count("so that training gets nowhere") == words


def failing(*failures):
    """A loss function that raises these, one in each of its first calls; None: it does not."""
    left = list(failures)

    def act():
        if left and (why := left.pop(0)) is not None:
            raise why

    return act


def test_what_fails_after_a_rehearsal_has_failed_otherwise_tells_of_both():
    step = made(ScriptedRuntime())
    act = failing(RuntimeError("no kernel for 2"), RuntimeError("ranks differ in collective 28"))
    with pytest.raises(RuntimeError, match="^ranks differ in collective 28\nsluice's rehearsal with 2 samples had failed before: "
                                           "RuntimeError: no kernel for 2$"):
        step(lambda x: act() or loss_of(step)(x), X)
    step(loss_of(step), X)
    later = failing(RuntimeError("another one"))
    with pytest.raises(RuntimeError, match="^another one$"):
        step(lambda x: later(), X)


@pytest.mark.parametrize("failures, told", [
    ((RuntimeError("not twice"), RuntimeError("not twice")), "^not twice$"),
    ((RuntimeError("a rehearsal's"), sluice.OutOfMemory("needs more")), "^needs more$"),
    ((RuntimeError("a rehearsal's"), None, RuntimeError("one that follows a commit")), "^one that follows a commit$"),
])
def test_what_fails_as_the_rehearsal_did_or_for_memory_or_after_a_commit_tells_of_itself_alone(failures, told):
    step = made(ScriptedRuntime())
    act = failing(*failures)
    with pytest.raises(RuntimeError, match=told):
        step(lambda x: act() or loss_of(step)(x), X)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 2, sparse=True)
    step = made(ScriptedRuntime(watch=False), model)
    with pytest.raises(sluice.SluiceError, match="sparse=False"):
        step(lambda x: model(x).sum(), torch.arange(4))


# --- loops written by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", [None, ScriptedRuntime()], ids=["plain", "shared"])
def test_a_block_that_is_not_as_it_should_be_is_told_so(runtime):
    step = made(runtime)
    with pytest.raises(RuntimeError, match="every micro-batch must be entered"):
        for _ in step.micro_batches(X):
            pass
    # the rehearsal swallows what it meets; the first slice says it
    with pytest.raises(sluice.SluiceError, match="ended without backward"):
        for micro in step.micro_batches(X):
            with micro:
                pass
    with pytest.raises(RuntimeError, match="call backward once"):
        for micro in step.micro_batches(X):
            with micro as x:
                micro.backward(loss_of(step)(x))
                micro.backward(loss_of(step)(x))
    with pytest.raises(RuntimeError, match="belongs into the micro-batch's block"):
        for micro in step.micro_batches(X):
            micro.backward(loss_of(step)(X))
    with pytest.raises(RuntimeError, match="is one try"):
        for micro in step.micro_batches(X):
            for _ in range(2):
                with micro as x:
                    micro.backward(loss_of(step)(x))
    with pytest.raises(RuntimeError, match="cannot begin inside of a micro-batch"):
        for micro in step.micro_batches(X):
            with micro as x:
                step(loss_of(step), x)
    assert step.stats()["steps"] == 0


def test_a_loop_that_is_left_early_has_not_trained():
    step = made(ScriptedRuntime())
    before = step.model.weight.clone()
    for micro in step.micro_batches(X):
        with micro as x:
            micro.backward(loss_of(step)(x))
        if micro.committed:
            break
    assert torch.equal(before, step.model.weight) and step.stats()["steps"] == 0 and step.loss is None


def test_a_closure_cannot_run_a_loop_again():
    with pytest.raises(ValueError, match=r"LBFGS calls a closure.*step\(loss_fn, x, y\)"):
        made(optimizer=torch.optim.LBFGS).micro_batches(X)
    with pytest.raises(ValueError, match="has not called its closure"):
        class Deaf(torch.optim.SGD):
            def step(self, closure=None):
                pass

        step = made(optimizer=Deaf, closure=True)
        step(loss_of(step), X)


def test_names_of_a_discarded_block_are_as_before():
    step = made(ScriptedRuntime(AT_COMMIT))
    blocks, output = 0, "before"
    names = []
    for micro in step.micro_batches(X):
        with micro as x:
            blocks += 1
            output = step.model(x)
            fresh = output * 2
            micro.backward(fresh.square().mean())
        names.append((micro.committed, blocks, type(output), type(fresh)))
        output = "before"
    kept = [(True, 1, torch.Tensor, torch.Tensor), (True, 2, torch.Tensor, torch.Tensor)]
    assert [each for each in names if each[0]] == kept
    assert all(each[2] is str for each in names if not each[0])
    assert names[0][1:] == (0, str, type(None)), "the rehearsal"
    assert not fresh.requires_grad


# --- wrappers -------------------------------------------------------------------------------------------------------------


def test_models_that_work_in_several_places_are_refused_where_memory_is_shared(monkeypatch):
    parallel = nn.DataParallel(nn.Linear(3, 2))
    parallel.device_ids = [0, 1]
    with pytest.raises(sluice.SluiceError, match=r"model.module"):
        made(ScriptedRuntime(), parallel)
    made(None, parallel)  # a step that does not share wraps what there is

    class Distributed(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = Distributed(nn.Linear(3, 2))
    groups = [{"params": list(model.parameters())}]
    with sharing(ScriptedRuntime()):
        with pytest.raises(sluice.SluiceError, match="reduces gradients inside of backward"):
            Engine(model, groups, None, None, (), None)  # whoever has it does not reduce them itself
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        Engine(model, groups, None, None, (), None)


def test_statistics_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _group=None: 2)
    with pytest.raises(sluice.SluiceError, match="put the model into DistributedDataParallel"):
        made(ScriptedRuntime(), nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2)))


def test_recorded_graphs_are_refused(monkeypatch):
    class Trees:
        manager = None

        @classmethod
        def get_manager(cls, device, create_if_none_exists):
            assert not create_if_none_exists
            return cls.manager

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", Trees)
    _checks.refuse_recorded_graphs(0)
    Trees.manager = object()
    with pytest.raises(sluice.SluiceError, match="max-autotune-no-cudagraphs"):
        _checks.refuse_recorded_graphs(0)


def test_parameters_are_followed_when_they_thaw():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    runtime = ScriptedRuntime(4)
    step = made(runtime, model)
    step(loss_of(step), X)
    before = model[0].weight.clone()
    model[0].requires_grad_(True)
    step(loss_of(step), X)
    assert not torch.equal(before, model[0].weight) and set(runtime.left_behind) == {0}


@pytest.mark.parametrize("shares, told", [
    (_runtime.CUDA, "a model on the processor trains without sharing: it is the GPU's memory"),
    (_runtime.HOST, "a model on the GPU trains without sharing: it is the processor's memory"),
], ids=["the GPU's", "the processor's"])
def test_a_model_lies_where_the_process_shares_memory_or_is_trained_without(shares, told, monkeypatch, capsys):
    class Attached:
        def backend(self) -> int:
            return shares

    runtime = Attached()
    monkeypatch.setattr(_runtime, "_attached", runtime)
    assert _runtime.attach(uses_cuda=shares == _runtime.CUDA) is runtime
    assert capsys.readouterr().err == ""
    assert _runtime.attach(uses_cuda=shares != _runtime.CUDA) is None
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_process_that_is_to_share_whatever_comes_ends_where_it_cannot(in_thread, tmp_path):
    """`--require-pool`: in a thread an exception would end that thread alone."""
    code = """
        import sys, threading
        from sluice import _runtime
        attach = lambda: _runtime.attach(uses_cuda=False)
        thread = threading.Thread(target=attach)
        thread.start() if sys.argv[1] == "True" else attach()
        thread.join() if sys.argv[1] == "True" else None
        print("trains without")
        """
    shared = {"SLUICE_RUN": "1", "SLUICE_RUNTIME_LIBRARY": str(tmp_path / "none.so")}
    command = [sys.executable, "-c", textwrap.dedent(code), str(in_thread)]
    path = {"PYTHONPATH": str(Path(_runtime.__file__).parents[1])}
    for required, code, said in (("0", 0, "trains without sharing: cannot open"),
                                 ("1", 125, "cannot train without sharing, since --require-pool forbids it: cannot open")):
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env=os.environ | shared | path | {"SLUICE_REQUIRE_POOL": required})
        assert done.returncode == code and said in done.stderr
        assert ("trains without" in done.stdout) == (code == 0)


def test_a_micro_batch_whose_arena_cannot_be_entered_is_ended():
    class Failing(ScriptedRuntime):
        fails = False

        def enter(self, entered: int) -> None:
            if self.fails and entered:
                raise RuntimeError("the device is gone")
            super().enter(entered)

    runtime = Failing()
    step = made(runtime)
    step(loss_of(step), X)
    runtime.fails = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        step(loss_of(step), X)
    assert runtime.discards == 1
    runtime.fails = False
    step(loss_of(step), X)
    assert step.stats()["steps"] == 2
