"""What Sluice uses of torch beyond its public interface: all of it, and nowhere else.

Each feature that needs such names stands in ``FEATURES``, with the names and with what is lost in a torch that lacks one.
``need`` refuses that feature by name, before anything has begun; a job that does not use it never asks. Names that no version
since 2.11 has been without, and without which nothing would work, are used as they are.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as _optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sluice.errors import SluiceError

__all__ = ["FEATURES", "FakeTensor", "Feature", "FullySharded", "TorchDispatchMode", "need", "tree_leaves"]


@dataclass(frozen=True)
class Feature:
    """What some of torch's own names are for."""

    what: str  # as a sentence begins that says it is not to be had
    names: tuple[str, ...]  # ``module:attribute``, or ``module:class.attribute``
    of_instances: tuple[str, ...] = ()  # attributes that objects get when they are made, ``kind.attribute``


FEATURES = {
    "gpu": Feature("training on a GPU in the pool", (
        "torch._C:_cuda_beginAllocateCurrentThreadToPool", "torch._C:_cuda_endAllocateToPool", "torch._C:_cuda_releasePool",
        "torch._C:_cuda_checkPoolLiveAllocations", "torch._C:_cuda_clearCublasWorkspaces")),
    "recurrent dropout": Feature("training recurrent layers with dropout on a GPU", (
        "torch._C:_AutoDispatchBelowADInplaceOrView", "torch.ops:aten._cudnn_init_dropout_state")),
    "agreement": Feature("training in processes that communicate inside of micro-batches, on the host", (
        "torch.distributed.distributed_c10d:_resolve_process_group", "torch.distributed:ProcessGroup._get_backend",
        "torch.ops:_c10d_functional.wait_tensor")),
    "communicator": Feature("agreeing on NCCL's collectives", (
        "torch.distributed:ProcessGroup._get_backend", "torch.distributed:ProcessGroupNCCL._comm_ptr")),
    "meshes": Feature("training models that are laid out over meshes of processes", (
        "torch.distributed._functional_collectives:_maybe_wrap_tensor",
        "torch.distributed._functional_collectives:_are_we_tracing", "torch.ops:_c10d_functional.wait_tensor")),
    "replicas": Feature("training in DistributedDataParallel", ("torch.nn.parallel:DistributedDataParallel._sync_buffers",), (
        "wrapper._comm_hooks", "wrapper._delay_all_reduce_params", "wrapper._join_config",
        "wrapper.parameters_to_ignore", "wrapper.modules_buffers",
        "wrapper.require_forward_param_sync")),
    "static graphs": Feature("training in DistributedDataParallel with static_graph=True", (), (
        "wrapper._static_graph_delay_allreduce_enqueued",)),
    "shards": Feature("training shards (fully_shard)", (
        "torch.distributed.fsdp:FSDPModule._get_fsdp_state", "torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState.IDLE"), (
        "state._training_state", "state._modules_to_run_forward", "state._comm_ctx", "state._state_ctx",
        "group.mesh_info", "group.fsdp_params", "group.device", "group.reduce_grads", "group.all_reduce_grads",
        "group.reshard_after_backward", "group._use_post_forward_mesh", "group._training_state", "group._sharded_state",
        "group._all_gather_result", "group._post_reduce_event", "group._reshard_after_forward_event", "group._all_reduce_state",
        "group._partial_reduce_output", "group._post_forward_indices")),
    "optimizers": Feature("taking an optimizer's step back", (
        "torch.optim.optimizer:_global_optimizer_pre_hooks", "torch.optim.optimizer:_global_optimizer_post_hooks"), (
        "optimizer._optimizer_step_pre_hooks", "optimizer._optimizer_step_post_hooks")),
}


@functools.cache
def need(feature: str) -> None:
    """Raises SluiceError if this torch lacks a name that the feature needs."""
    what = FEATURES[feature]
    _refuse_without(what, [name for name in what.names if not _is_there(name)])


@functools.cache
def has(feature: str) -> bool:
    """Whether this torch has all names that the feature needs."""
    return all(map(_is_there, FEATURES[feature].names))


def need_of(feature: str, **objects: Any) -> None:
    """The same, and for what objects of torch's must have, which are given by their kind."""
    need(feature)
    what = FEATURES[feature]
    kinds = (name.partition(".") for name in what.of_instances)
    _refuse_without(what, [f"{type(objects[kind]).__name__}.{attribute}" for kind, _, attribute in kinds
                           if kind in objects and not hasattr(objects[kind], attribute)])


def _refuse_without(what: Feature, missing: list[str]) -> None:
    if missing:
        raise SluiceError(f"{what.what} needs what torch {torch.__version__} does not have: {', '.join(missing).replace(':', '.')}. "
                          "Use a version that docs/pytorch.md names, or train without `sluice run`")


def _is_there(name: str) -> bool:
    place, _, path = name.partition(":")
    try:
        found = torch.ops if place == "torch.ops" else importlib.import_module(place)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


# --- modules, tensors and operators: used everywhere, and there in every version ---------------------------------------


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own, by name; of TorchScript something that is like a dictionary, but has no ``get``."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def key_of(storage: torch.UntypedStorage) -> int:
    """What tells a storage from others as long as it lives, and is what a ``StorageWeakRef`` has as ``cdata``."""
    return storage._cdata


def storage_behind(reference: Any) -> torch.UntypedStorage | None:
    """What a ``StorageWeakRef`` refers to, if it still is."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def copy_all(places: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Copies each of the others to its place, in few launches."""
    torch._foreach_copy_(places, others)


def add_all(places: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    torch._foreach_add_(places, others)


def divide_all(places: list[torch.Tensor], divisor: torch.Tensor | float) -> None:
    torch._foreach_div_(places, divisor)


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether it has batch normalisation of any kind."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def schema_of(operator: Any) -> Any:
    """None of an operator of higher order."""
    return getattr(operator, "_schema", None)


# --- torch.compile -----------------------------------------------------------------------------------------------------


def is_compiled(what: Any) -> bool:
    """Whether a function, or a module or one in it, is run by torch.compile."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    if not isinstance(what, nn.Module):
        return hasattr(what, "_torchdynamo_orig_callable")
    return any(isinstance(module, dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
               for module in what.modules())


def is_anything_compiled() -> bool:
    """Whether somebody in this process has called torch.compile; True where this torch does not tell."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", None)
    return frames is not None and (backends is None or any(map(callable, backends.values())))


def has_recorded_graphs(device: int) -> bool:
    """Whether torch.compile replays CUDA graphs on that device."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return trees is not None and trees.get_manager(device, create_if_none_exists=False) is not None


# --- a GPU's memory ----------------------------------------------------------------------------------------------------


def begin_allocating(device: int, pool: torch.cuda.MemPool) -> None:
    """What this thread allocates comes from the pool."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool.id)


def end_allocating(device: int, pool: torch.cuda.MemPool) -> None:
    """Every end is paired with a release, else a pool that is dropped goes on counting in ``reserved_bytes``."""
    torch._C._cuda_endAllocateToPool(device, pool.id)
    torch._C._cuda_releasePool(device, pool.id)


def is_empty(device: int, pool: torch.cuda.MemPool) -> bool:
    """Whether nothing that was allocated from the pool lives."""
    return torch._C._cuda_checkPoolLiveAllocations(device, pool.id, set())


def clear_cublas_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()


def watch_shortages(observer: Callable[[int, int, int, int], None]) -> bool:
    """Has the CUDA allocator call it, with device and bytes wanted, allocated and free, before it gives up; False if this torch
    has no such hook, and only the runtime's own word is said then."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return False
    attach(observer)
    return True


DROPOUT_OPERATOR = "_cudnn_init_dropout_state"


def make_dropout_state(*args: Any, **named: Any) -> torch.Tensor:
    """What torch makes for the dropout of recurrent layers, by the operator's own implementation."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return getattr(torch.ops.aten, DROPOUT_OPERATOR)(*args, **named)


# --- processes ---------------------------------------------------------------------------------------------------------


def wait_for_functional(tensor: torch.Tensor) -> None:
    """For a functional collective that has returned the tensor."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def group_named(name: str) -> Any:
    """The process group that operators call so."""
    return distributed.distributed_c10d._resolve_process_group(name)


def patience_of(group: Any) -> float:
    """How many seconds a process group on the host waits for a collective."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def communicator_of(group: Any, device: torch.device) -> int:
    """The address of a process group's NCCL communicator; 0 if none has been made yet."""
    need("communicator")
    return group._get_backend(device)._comm_ptr()


def watch_functional_collectives(returned: Callable[[torch.Tensor], None]) -> None:
    """Has it called with what each functional collective returns, unless that is traced only."""
    need("meshes")
    from torch.distributed import _functional_collectives as collectives

    wrap, traces = collectives._maybe_wrap_tensor, collectives._are_we_tracing

    @functools.wraps(wrap)
    def noted(tensor: torch.Tensor) -> torch.Tensor:
        if not traces():
            returned(tensor)
        return wrap(tensor)

    collectives._maybe_wrap_tensor = noted


# --- DistributedDataParallel -------------------------------------------------------------------------------------------


def has_communication_hook(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    return bool(wrapper._comm_hooks)


def delays_reductions(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Of some parameters, as ``delay_all_reduce_named_params`` asks for."""
    return bool(wrapper._delay_all_reduce_params)


def joins(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Whether it is inside of ``join``."""
    return wrapper._join_config.enable


def send_buffers(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Gives every process the buffers of the first, if that was asked for."""
    if wrapper.broadcast_buffers and wrapper.modules_buffers:
        wrapper._sync_buffers()


def leave_first_reduction(wrapper: nn.parallel.DistributedDataParallel) -> Callable[[], None]:
    """With a static graph the first backward reduces also under ``no_sync``, unless it takes that for begun: now it does. Returns
    what takes that back."""
    need_of("static graphs", wrapper=wrapper)
    name = "_static_graph_delay_allreduce_enqueued"
    before = getattr(wrapper, name)
    setattr(wrapper, name, True)
    return lambda: setattr(wrapper, name, before)


# --- fully_shard -------------------------------------------------------------------------------------------------------


#: What torch keeps of modules that were given to ``fully_shard``, in one version or another. What it keeps beyond that might be of
#: a pass that is taken back, and stay: training would be wrong without a word.
KEPT_OF_SHARDS = {
    "shared": {"device_handle", "all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream",
               "reduce_scatter_max_input_buffers", "all_gather_state", "reduce_scatter_state", "reduce_scatter_states",
               "post_forward_order", "_last_post_reduce_events", "active_gradient_reduction"},
    "passes": {"all_states", "is_last_backward", "iter_forward_root", "post_backward_final_callback_queued", "post_optim_event",
               "gradient_reduction_pending", "manual_backward_finalization", "manual_backward_finalization_active"},
    "group": {"_all_gather_comm", "_all_gather_output", "_all_gather_output_fn", "_all_gather_result", "_all_reduce_hook",
              "_all_reduce_hook_stream", "_all_reduce_state", "_fsdp_params_with_wider_grad_dtype", "_module_fqn",
              "_module_to_pre_load_state_dict_hook_handle", "_module_to_pre_save_state_dict_hook_handle", "_num_param_groups",
              "_param_group_index", "_partial_reduce_output", "_partial_reduce_output_layout", "_post_backward_pending",
              "_post_forward_indices", "_post_reduce_event", "_prepare_reduce_scatter_inputs", "_reduce_dtype", "_orig_dtype",
              "_reduce_scatter_comm", "_reduce_scatter_param_indices", "_reset_sharded_params", "_reshard_after_forward_event",
              "_sharded_state", "_training_state", "all_reduce_grads", "comm_ctx", "device", "device_handle",
              "force_sum_reduction_for_comms", "fsdp_params", "gradient_divide_factor", "mesh_info", "modules", "mp_policy",
              "offload_policy", "post_forward_mesh_info", "reduce_grads", "reduce_scatter_max_input_buffers",
              "reduce_scatter_unused_params", "reshard_after_backward", "unshard_async_op", "unshard_in_backward"},
}


class FullySharded:
    """What torch keeps of modules that were given to ``fully_shard``: where each pass has come to, and the parameters' parts."""

    def __init__(self, modules: Iterable[Any]) -> None:
        need("shards")
        self._states = list({id(state): state for state in (each._get_fsdp_state() for each in modules)}.values())
        for state in self._states:
            need_of("shards", state=state)
        self._groups = [group for state in self._states for group in self._groups_of(state)]
        for group in self._groups:
            need_of("shards", group=group)
        self._is_known = False  # all that torch keeps, some of it from the first pass on
        self._refuse_unknown()
        self.meshes = list(dict.fromkeys(group.mesh_info.mesh for group in self._groups))
        self.device = self._groups[0].device

    @staticmethod
    def _groups_of(state: Any) -> list[Any]:
        """Several from 2.12 on; before that one, or none."""
        several = getattr(state, "_fsdp_param_groups", None)
        if several is None:
            one = getattr(state, "_fsdp_param_group", None)
            several = [one] if one is not None else []
        return list(several)

    def _refuse_unknown(self) -> None:
        for kind, kept in [*(("shared", state._comm_ctx) for state in self._states),
                           *(("passes", state._state_ctx) for state in self._states),
                           *(("group", group) for group in self._groups)]:
            if unknown := sorted(vars(kept).keys() - KEPT_OF_SHARDS[kind]):
                names = ", ".join(f"{type(kept).__name__}.{name}" for name in unknown)
                raise SluiceError(f"training shards (fully_shard) needs to know all that torch keeps of a pass, and torch {torch.__version__} "
                                  f"keeps {names}. Use a version that docs/pytorch.md names, or train without `sluice run`")

    @property
    def meshes_of_parameters(self) -> list[Any]:
        """Those over which each parameter lies, which may have been in parts before."""
        return [param.sharded_param.device_mesh for group in self._groups for param in group.fsdp_params]

    @property
    def offloaded(self) -> bool:
        return any(param.offload_to_cpu for group in self._groups for param in group.fsdp_params)

    @property
    def gathers_elsewhere(self) -> bool:
        """Whether some are kept over other processes between forward and backward."""
        return any(group._use_post_forward_mesh for group in self._groups)

    @property
    def reduces_always(self) -> bool:
        return all(group.reduce_grads and group.all_reduce_grads and group.reshard_after_backward for group in self._groups)

    @property
    def ends_each_backward(self) -> bool:
        """Without another call: torch has one for that from 2.15 on."""
        return all(state._state_ctx.is_last_backward and not getattr(state._state_ctx, "manual_backward_finalization", False)
                   for state in self._states)

    def reshard(self) -> None:
        for group in self._groups:
            group.reshard()

    def reset(self) -> None:
        """No pass has begun: torch takes the next for a first one."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        if not self._is_known:  # after the rehearsal, before anything counts
            self._refuse_unknown()
            self._is_known = True
        for state in self._states:
            state._training_state = TrainingState.IDLE
            state._modules_to_run_forward.clear()
            passes, shared = state._state_ctx, state._comm_ctx
            passes.iter_forward_root = None
            passes.post_backward_final_callback_queued = False
            _set_if_there(passes, gradient_reduction_pending=False, manual_backward_finalization_active=None)
            if hasattr(shared, "post_forward_order"):  # else it has never run
                _clear_if_there(shared, "post_forward_order", "reduce_scatter_states", "_last_post_reduce_events")
                _set_if_there(shared, all_gather_state=None, reduce_scatter_state=None, active_gradient_reduction=None)
        for group in self._groups:
            self._reset(group, TrainingState.IDLE)

    @staticmethod
    def _reset(group: Any, idle: Any) -> None:
        """The parameters of one module: each process has its part again, and nothing is under way."""
        group._training_state = idle
        if group._all_gather_result is not None:
            work = group._all_gather_result.all_gather_work
            if isinstance(work, distributed.Work):
                work.wait()  # it writes into memory that goes
        group._all_gather_result = group._post_reduce_event = group._reshard_after_forward_event = None
        group._all_reduce_state = group._partial_reduce_output = None
        _set_if_there(group, _post_backward_pending=False)
        _clear_if_there(group, "_post_forward_indices", "_partial_reduce_output_layout")
        group._sharded_state = type(group._sharded_state).SHARDED
        for param in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(param):  # from 2.15 on it is the parameter's own gradient
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        if hasattr(group, "_set_unsharded_grad_dtypes"):
            group._set_unsharded_grad_dtypes(defer_upcast=False)
        for param in group.fsdp_params:
            param.to_sharded()


def _set_if_there(kept: Any, **values: Any) -> None:
    """What not all versions have."""
    for name, value in values.items():
        if hasattr(kept, name):
            setattr(kept, name, value)


def _clear_if_there(kept: Any, *names: str) -> None:
    for name in names:
        if hasattr(kept, name):
            getattr(kept, name).clear()


# --- optimizers --------------------------------------------------------------------------------------------------------


def step_hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]] | None:
    """All that torch calls before and after its step; None where this torch does not tell."""
    if not has("optimizers"):
        return None
    tables = (getattr(optimizer, "_optimizer_step_pre_hooks", None), getattr(optimizer, "_optimizer_step_post_hooks", None),
              _optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks)
    return None if None in tables else [hook for table in tables for hook in table.values()]


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Schedulers of torch's wrap an optimizer's ``step``, to see that it is called."""
    return getattr(step, "_wrapped_by_lr_sched", False)
