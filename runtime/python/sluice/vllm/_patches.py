"""Where vLLM's engine meets the elastic cache: it allocates the cache, has a pool of blocks, asks that for slots, and makes steps.

    worker: _allocate_kv_cache[_tensors] ─► a range of the pool, chunk 0 behind it ─► views of the layers
    scheduler: BlockPool ─► takes that over; allocate_slots ─► grows where it would say no
               schedule … update_from_output ─► a step is in flight; what is idle, or demanded, goes before and after it
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import vllm.v1.core.kv_cache_coordinator as coordinator
import vllm.v1.worker.gpu.attn_utils as second_runner
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from sluice.vllm import _checks
from sluice.vllm._cache import ElasticCache
from sluice.vllm._elastic import Keeping, requests_to_preempt
from sluice.vllm._layout import DoesNotFit, Layout
from sluice.vllm._space import PoolSpace

logger = logging.getLogger("vllm.sluice")
READ_BEFORE_A_WINDOW = 512  # tokens; FlashAttention 3 and Triton take up to 128 at once
FIRST_CHUNK_MS = 60_000  # a start waits so long for the one chunk that it cannot do without


@dataclass(frozen=True)
class _Device:
    """A GPU; or the processor, which has computed what it is given when that returns."""

    device: torch.device

    def mark(self) -> Callable[[], object]:
        if self.device.type == "cpu":
            return lambda: None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    def finish(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)


@dataclass
class _Allocated:
    """A range that a worker has allocated, and the cache in it, once a pool of blocks has taken that over."""

    layout: Layout
    space: PoolSpace
    device: torch.device
    cache: ElasticCache | None = None


_allocated: list[_Allocated] = []  # that no pool of blocks has taken over yet


class ElasticBlockPool(BlockPool):
    """vLLM's, with the blocks of the chunks that there are."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int, enable_kv_cache_events: bool = False,
                 metrics_collector: Any = None) -> None:
        if not _allocated:
            raise _checks.Refused("no worker in this process has allocated it: that is another process, or another runner of models than are known")
        allocated = _allocated.pop()
        super().__init__(1, enable_caching, hash_block_size, enable_kv_cache_events, metrics_collector)
        self.elastic = allocated.cache = ElasticCache(allocated.layout, allocated.space, keeping(), KVCacheBlock, self._maybe_evict_cached_block,
                                                      _Device(allocated.device))
        self.blocks = _ById(self.elastic)
        self.free_block_queue = self.elastic.blocks.free
        self.null_block = self.elastic.blocks.null_block
        self.null_block.is_null = True

    @property
    def num_gpu_blocks(self) -> int:
        """Those that there are, with the one that stands for none: what is in use is what is not free."""
        if not hasattr(self, "elastic"):
            return 1
        free = self.elastic.blocks.free
        return free.live + free.num_free_blocks + 1

    @num_gpu_blocks.setter
    def num_gpu_blocks(self, count: int) -> None:
        """vLLM's own beginning sets it."""

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.elastic.blocks.free.forget_cached()
        return True

    def get_usage(self) -> float:
        """Of all blocks that there can be: the capacity that vLLM was started with."""
        most = self.elastic.blocks.layout.blocks - 1
        return self.elastic.blocks.free.live / most if most else 0.0


class _ById:
    """The blocks that there are, by id, as long as all ids."""

    def __init__(self, elastic: ElasticCache) -> None:
        self._blocks = elastic.blocks.blocks
        self._ids = elastic.blocks.layout.ids

    def __len__(self) -> int:
        return self._ids

    def __getitem__(self, block_id: int) -> KVCacheBlock:
        return self._blocks[block_id]

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(list(self._blocks.values()))


def keeping() -> Keeping:
    """What the environment says of it."""
    usual = Keeping()
    return Keeping(_number("SLUICE_VLLM_SPARE_CHUNKS", usual.spare), _number("SLUICE_VLLM_CACHED_CHUNKS", usual.cached),
                   _number("SLUICE_VLLM_LINGER_MS", int(usual.linger_s * 1000)) / 1000)


def _number(name: str, usual: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise _checks.Refused(f"{name} is {text!r}, must be a number of 0 or more")
    return int(text) if text else usual


def _allocate(runner: GPUModelRunner | SecondRunner, kv_cache: KVCacheConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """What vLLM does with `torch.zeros`: each layer's view, in a range of the pool."""
    config: VllmConfig = runner.vllm_config
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    _checks.check_engine(config, device.type, backends, config.scheduler_config.get_scheduler_cls(), (Scheduler, AsyncScheduler))
    page = _checks.check_tensors(kv_cache, (AttentionSpec,))
    keeping()
    _allocated.clear()  # a first one, in which vLLM has tried graphs: it would keep a chunk
    runner.sluice_allocated = None
    space = PoolSpace(os.environ.get("SLUICE_NAME") or "vllm", _gpu(device))
    try:
        layout = Layout.for_blocks(kv_cache.num_blocks, space.chunk_bytes, page, len(kv_cache.kv_cache_tensors))
    except DoesNotFit as why:
        raise _checks.Refused(str(why)) from why
    if isinstance(runner, SecondRunner) and layout.blocks_per_chunk <= len(kv_cache.kv_cache_groups):
        raise _checks.Refused(f"a chunk has {layout.blocks_per_chunk} blocks, and vLLM's second model runner begins with {len(kv_cache.kv_cache_groups) + 1}: "
                              "smaller blocks (--block-size), larger chunks of the pool, or VLLM_USE_V2_MODEL_RUNNER=0")
    if layout.chunks > space.pool_chunks:
        raise _checks.Refused(f"it is to have up to {kv_cache.num_blocks} blocks, which are {layout.chunks} chunks, and the pool has "
                              f"{space.pool_chunks}: --num-gpu-blocks-override {space.pool_chunks * layout.blocks_per_chunk} at most, or "
                              "--kv-cache-memory-bytes likewise, or a larger pool")
    base = space.reserve(layout.chunks)
    if not space.back([0], FIRST_CHUNK_MS):
        raise _checks.Refused(f"the pool has not granted the first chunk within {FIRST_CHUNK_MS // 1000} s")
    whole = _whole(space, base, layout.chunks * layout.chunk_bytes, device)
    views = {}
    for layer, tensor in enumerate(kv_cache.kv_cache_tensors):
        begin, length = layout.view(layer)
        views.update(dict.fromkeys(tensor.shared_by, whole[begin:begin + length]))
    runner.sluice_allocated = _Allocated(layout, space, device)
    _allocated.append(runner.sluice_allocated)
    logger.info("The KV cache lies in Sluice's pool: up to %d chunks of %d bytes, with %d blocks each", layout.chunks, layout.chunk_bytes,
                layout.blocks_per_chunk)
    return views


def _gpu(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


class _OnGpu:
    """Memory of a GPU as torch takes it from others, which then keeps this."""

    def __init__(self, space: PoolSpace, base: int, length: int) -> None:
        self.space = space
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|i1", "data": (base, False), "version": 2}


def _whole(space: PoolSpace, base: int, length: int, device: torch.device) -> torch.Tensor:
    """The range, most of which has no memory; the space lives as long as a view of it does."""
    if device.type != "cpu":
        return torch.as_tensor(_OnGpu(space, base, length), device=device)
    memory = (ctypes.c_int8 * length).from_address(base)
    memory.space = space
    return torch.frombuffer(memory, dtype=torch.int8)


def _allocate_tensors(runner: GPUModelRunner, kv_cache: KVCacheConfig) -> dict[str, torch.Tensor]:
    return _allocate(runner, kv_cache, runner.device)


def _initialize_second(inner: Callable[..., Any], runner: SecondRunner, kv_cache: KVCacheConfig) -> None:
    """What allocates is a function of the module there, which is not told for whom."""
    def allocate(of: KVCacheConfig, _shared_layers: object, device: torch.device) -> dict[str, torch.Tensor]:
        return _allocate(runner, of, device)

    vllms = second_runner._allocate_kv_cache
    second_runner._allocate_kv_cache = allocate
    try:
        inner(runner, kv_cache)
    finally:
        second_runner._allocate_kv_cache = vllms
    # Its warm-up numbers blocks from 1 on, as many as it is told that there are: those of the first chunk alone have memory.
    runner.kv_cache_config.num_blocks = runner.sluice_allocated.layout.blocks_per_chunk


def _execute_model(inner: Callable[..., Any], runner: Any, scheduler_output: SchedulerOutput, *arguments: Any, **named: Any) -> Any:
    made = inner(runner, scheduler_output, *arguments, **named)
    if (step := getattr(scheduler_output, "sluice_step", None)) is not None:
        runner.sluice_allocated.cache.submitted(step)
    return made


def _cache_of(scheduler: Scheduler) -> ElasticCache:
    return scheduler.kv_cache_manager.block_pool.elastic


def _preempt(scheduler: Scheduler, chunks: int | None) -> int:
    """Ends what runs on so many chunks, or all that runs, as vLLM itself does when its cache is reset: it is computed anew later."""
    blocks = _cache_of(scheduler).blocks
    held = [(request, blocks.chunks_of(block_id for group in scheduler.kv_cache_manager.get_block_ids(request.request_id) for block_id in group) - {0})
            for request in scheduler.running]
    chosen = list(scheduler.running) if chunks is None else requests_to_preempt(held, chunks)
    for request in reversed(chosen):  # so that they are served in the same order as before
        scheduler._preempt_request(request, time.monotonic())
        scheduler.running.remove(request)  # after it waits: an engine that finds nobody in between would sleep
        request.async_tokens_to_discard += request.num_output_placeholders  # what is in flight for it
        request.num_output_placeholders = 0
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        scheduler.sluice_preempted.add(request.request_id)
    return len(chosen)


def _remove_skipped_blocks(inner: Callable[..., Any], manager: SingleTypeKVCacheManager, request_id: str, computed_tokens: int) -> None:
    """Kernels begin at a multiple of some tokens before a window, and leave out of what they have read what lies before it: that must be there."""
    inner(manager, request_id, max(0, computed_tokens - READ_BEFORE_A_WINDOW))


def _begin(inner: Callable[..., Any], scheduler: Scheduler, *arguments: Any, **named: Any) -> None:
    scheduler.sluice_preempted = set()  # between two steps
    scheduler.sluice_prompt_logprobs = {}  # by request: of a step whose token is not taken
    inner(scheduler, *arguments, **named)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """`around` is called in its place, with the function that was there first."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*arguments: Any, **named: Any) -> Any:
        return around(inner, *arguments, **named)

    setattr(owner, name, outer)


def _schedule(inner: Callable[..., Any], scheduler: Scheduler, *arguments: Any, **named: Any) -> Any:
    cache = _cache_of(scheduler)
    with cache.lock:
        cache.preempt_by(scheduler.sluice_preempt)
        cache.before_step()
        made = inner(scheduler, *arguments, **named)
        if scheduler.use_v2_model_runner:  # which keeps what it has of a request until it is told
            made.preempted_req_ids = (made.preempted_req_ids or set()) | scheduler.sluice_preempted
        scheduler.sluice_preempted.clear()
        made.sluice_step = cache.launched()
        return made


def _update_from_output(inner: Callable[..., Any], scheduler: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
    cache = _cache_of(scheduler)
    with cache.lock:
        _keep_prompt_logprobs(scheduler, model_runner_output)
        made = inner(scheduler, scheduler_output, model_runner_output)
        cache.after_step()
        return made


def _keep_prompt_logprobs(scheduler: Scheduler, output: ModelRunnerOutput) -> None:
    """What was in flight for a request that has been preempted is left out, and vLLM takes nothing of a prompt without a token behind it. That is made
    once, so it goes to the next token that is taken."""
    kept = scheduler.sluice_prompt_logprobs
    for request_id in [each for each in kept if each not in scheduler.requests]:
        del kept[request_id]
    for request_id in output.req_ids:
        request = scheduler.requests.get(request_id)
        if request is None:
            continue
        if request.async_tokens_to_discard > 0:
            if (tensors := output.prompt_logprobs_dict.pop(request_id, None)) is not None:
                kept[request_id] = tensors
        elif request_id in kept and output.sampled_token_ids and output.sampled_token_ids[output.req_id_to_index[request_id]]:
            tensors = kept.pop(request_id)
            if output.prompt_logprobs_dict.get(request_id) is None:
                output.prompt_logprobs_dict[request_id] = tensors


def _with_lock(inner: Callable[..., Any], scheduler: Scheduler, *arguments: Any, **named: Any) -> Any:
    with _cache_of(scheduler).lock:
        return inner(scheduler, *arguments, **named)


def _grow_where_slots_are_missing() -> None:
    """Called for each request of each step: by `_wrap` it would take three times as long."""
    inner = KVCacheManager.allocate_slots

    @functools.wraps(inner)
    def allocate_slots(manager: KVCacheManager, *arguments: Any, **named: Any) -> Any:
        while (slots := inner(manager, *arguments, **named)) is None and manager.block_pool.elastic.grow():
            pass
        return slots

    KVCacheManager.allocate_slots = allocate_slots


def install() -> None:
    """From now on engines of this process have an elastic cache."""
    GPUModelRunner._allocate_kv_cache_tensors = _allocate_tensors
    _wrap(SecondRunner, "initialize_kv_cache", _initialize_second)
    for runner in (GPUModelRunner, SecondRunner):
        _wrap(runner, "execute_model", _execute_model)
    coordinator.BlockPool = ElasticBlockPool
    Scheduler.sluice_preempt = _preempt
    _wrap(Scheduler, "__init__", _begin)
    _grow_where_slots_are_missing()
    _wrap(Scheduler, "schedule", _schedule)
    _wrap(Scheduler, "update_from_output", _update_from_output)
    _wrap(SingleTypeKVCacheManager, "remove_skipped_blocks", _remove_skipped_blocks)
    _wrap(Scheduler, "add_request", _with_lock)
    _wrap(Scheduler, "finish_requests", _with_lock)
    _wrap(Scheduler, "reset_prefix_cache", _with_lock)
