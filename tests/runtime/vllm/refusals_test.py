"""Another vLLM than the one that is known, and engines whose parts would find blocks where there are none, are refused by name."""

import inspect
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
pytest.importorskip("torch")

import sluice.vllm  # noqa: E402
from sluice.errors import SluiceError  # noqa: E402
from sluice.vllm import _checks  # noqa: E402


class Scheduler:
    pass


def with_parameters(names: str):
    """A function that has them."""
    def function(*_arguments):
        raise AssertionError("it is only looked at")

    function.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names.split()])
    return function


def parts_of(place: str) -> tuple[str, str, str]:
    """Module, class and function; without a class where it is the module's own."""
    module, _, path = place.partition(":")
    kind, _, name = path.rpartition(".")
    return module, kind, name


def owner_of(modules: dict, module: str, kind: str) -> object:
    return getattr(modules[module], kind) if kind else modules[module]


@pytest.fixture
def vllm(monkeypatch):
    """Modules with the functions that are known, and no others; what they make."""
    modules = {"vllm": types.ModuleType("vllm")}
    modules["vllm"].__version__ = f"{_checks.VERSION}+cpu"
    places = {**_checks._FUNCTIONS, **{f"vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.{name}": "self" for name in _checks._QUEUE}}
    for place, parameters in places.items():
        module, kind, name = parts_of(place)
        owner = modules.setdefault(module, types.ModuleType(module))
        if kind and not hasattr(owner, kind):
            setattr(owner, kind, type(kind, (), {}))
        setattr(owner_of(modules, module, kind), name, with_parameters(parameters))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_the_vllm_that_is_known_is_taken(vllm):
    _checks.check_vllm()


def test_another_version_is_refused_with_the_one_that_is_known(vllm):
    vllm["vllm"].__version__ = "0.32.0"
    with pytest.raises(_checks.Refused, match=r"this is vLLM 0\.32\.0; 0\.24\.0 is known: pip install.*SLUICE_VLLM_KV=own"):
        _checks.check_vllm()


@pytest.mark.parametrize("place", _checks._FUNCTIONS)
def test_a_function_with_other_parameters_is_refused_by_name(vllm, place):
    module, kind, name = parts_of(place)
    setattr(owner_of(vllm, module, kind), name, with_parameters("self another"))
    with pytest.raises(_checks.Refused, match=rf"{name} has the parameters \(self another\) instead of \({_checks._FUNCTIONS[place].split()[0]}"):
        _checks.check_vllm()


@pytest.mark.parametrize("place", _checks._FUNCTIONS)
def test_a_function_that_is_not_there_is_refused_by_name(vllm, place):
    module, kind, name = parts_of(place)
    if name == "__init__":
        delattr(vllm[module], kind)
    else:
        delattr(owner_of(vllm, module, kind), name)
    with pytest.raises(_checks.Refused, match=f"has no {place}"):
        _checks.check_vllm()


def test_a_queue_that_can_do_more_is_refused(vllm):
    vllm["vllm.v1.core.kv_cache_utils"].FreeKVCacheBlockQueue.pop_oldest = with_parameters("self")
    with pytest.raises(_checks.Refused, match="other functions: pop_oldest"):
        _checks.check_vllm()


def config(**changed) -> SimpleNamespace:
    """Of an engine that is taken, as far as it is looked at. Names with a dot change a part."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1, distributed_executor_backend="uni"),
        kv_transfer_config=None, kv_events_config=None, ec_transfer_config=None, speculative_config=None,
        cache_config=SimpleNamespace(kv_offloading_size=None), model_config=SimpleNamespace(enable_sleep_mode=False, enable_return_routed_experts=False))
    for name, value in changed.items():
        part, _, field = name.rpartition("__")
        setattr(getattr(made, part) if part else made, field, value)
    return made


def check(made: SimpleNamespace, device: str = "cpu", backend: str = "CPU_ATTN", scheduler: type = Scheduler) -> None:
    _checks.check_engine(made, device, [backend], scheduler, [Scheduler])


def test_an_engine_of_one_process_is_taken():
    check(config())
    check(config(kv_events_config=SimpleNamespace(enable_kv_cache_events=False)))


@pytest.mark.parametrize(("changed", "why"), [
    ({"parallel_config__world_size": 2}, r"2 workers.*--tensor-parallel-size 1"),
    ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size 1"),
    ({"parallel_config__distributed_executor_backend": "mp"}, r"another process than the scheduler \(mp\).*VLLM_ENABLE_V1_MULTIPROCESSING=0"),
    ({"kv_transfer_config": SimpleNamespace(kv_connector="Nixl")}, r"a KV connector \(Nixl\).*no `--kv-transfer-config`"),
    ({"cache_config__kv_offloading_size": 4.0}, "--kv-offloading-size"),
    ({"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}, "--kv-events-config"),
    ({"ec_transfer_config": object()}, "--ec-transfer-config"),
    ({"speculative_config": SimpleNamespace(method="ngram")}, r"speculative decoding \(ngram\).*no `--speculative-config`"),
    ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode"),
    ({"model_config__enable_return_routed_experts": True}, "--enable-return-routed-experts"),
])
def test_an_engine_whose_parts_do_not_fit_is_refused_by_name(changed, why):
    with pytest.raises(_checks.Refused, match=why):
        check(config(**changed))


@pytest.mark.parametrize(("how", "why"), [
    ({"device": "xpu"}, r"another device \(xpu\)"), ({"backend": "FLEX_ATTENTION"}, "FlexAttention"),
    ({"device": "cuda", "backend": "FLASHINFER"}, r"another attention backend on a GPU \(FLASHINFER\)"), ({"scheduler": int}, r"another scheduler \(builtins\.int\)"),
])
def test_what_computes_otherwise_is_refused_by_name(how, why):
    with pytest.raises(_checks.Refused, match=why):
        check(config(), **how)


def test_the_page_on_vllm_has_each_refusal_and_no_other():
    page = (Path(__file__).resolve().parents[3] / "docs" / "llm.md").read_text(encoding="utf-8")
    table = page.partition("| refused | why | instead |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [f"| {each.what} | {each.why} | {each.instead} |" for each in _checks.REFUSALS]


def cache(*tensors: tuple[int, str], spec: object = 0.0, stride: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_blocks=4, kv_cache_tensors=[SimpleNamespace(size=size, shared_by=[name], block_stride=stride) for size, name in tensors],
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[name for _, name in tensors])])


def test_the_page_is_a_tensors_bytes_by_its_blocks():
    assert _checks.check_tensors(cache((4096, "a"), (4096, "b")), (float,)) == 1024


@pytest.mark.parametrize(("made", "why"), [
    (cache(), "the model has none"),
    (cache((4096, "a"), (8192, "b")), r"different sizes.*1024 bytes: a; 2048 bytes: b"),
    (cache((4096, "a"), stride=64), "a share one packed tensor"),
    (cache((4095, "a")), "4095 bytes are not 4 pages"),
    (cache(*((4096, f"layer {n}") for n in range(9)), spec="state"), "layer 0, layer 1, layer 2 and 6 more have a str"),
])
def test_a_cache_that_does_not_fit_is_refused_by_name(made, why):
    with pytest.raises(_checks.Refused, match=why):
        _checks.check_tensors(made, (float,))


def test_the_plugin_does_nothing_unasked(monkeypatch):
    monkeypatch.delenv("SLUICE_VLLM_KV", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # to import it is an error
    sluice.vllm.register()


def test_what_is_neither_yes_nor_no_is_refused(monkeypatch):
    monkeypatch.setenv("SLUICE_VLLM_KV", "yes")
    with pytest.raises(SluiceError, match="SLUICE_VLLM_KV is 'yes', must be pool, or own"):
        sluice.vllm.register()
