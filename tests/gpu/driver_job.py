"""Jobs about the driver's memory calls; see memory_training.py."""

from __future__ import annotations

import ctypes
import os

from memory_training import MIB, Training, own_status, ready, run  # first: sets up CUDA

import torch


class Foreign:
    """The driver as a library that is not torch's calls it."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        torch.cuda.init()
        torch.ones(1, device="cuda")  # makes the context current here

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        result = self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        assert result == 0, f"cuMemAlloc of {size} bytes: CUDA error {result}"
        return address.value

    def fill(self, address: int, value: int, size: int) -> None:
        assert self._cuda.cuMemsetD8_v2(ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size)) == 0

    def holds(self, address: int, value: int, size: int) -> bool:
        host = ctypes.create_string_buffer(size)
        assert self._cuda.cuMemcpyDtoH_v2(host, ctypes.c_uint64(address), ctypes.c_size_t(size)) == 0
        return host.raw == bytes([value]) * size

    def free(self, address: int) -> None:
        assert self._cuda.cuMemFree_v2(ctypes.c_uint64(address)) == 0


def foreign() -> dict:
    training, library, size = Training(), Foreign(), 20 * MIB
    training.warm_up()
    blocks = {library.allocate(size): value for value in (17, 34, 51, 68)}
    for address, value in blocks.items():
        library.fill(address, value, size)
    training.until_told()
    intact = [library.holds(address, value, size) for address, value in blocks.items()]
    for address in blocks:
        library.free(address)
    return {"intact": intact, "addresses": list(blocks), "discards": training.discards, "pid": os.getpid()}


def small() -> dict:
    """A thousand allocations of 1 KiB to 3 MiB, by the driver's function and by torch; what is idle stays the job's
    until its first micro-batch, or a demand."""
    library = Foreign()
    torch.cuda.empty_cache()
    sizes = [1024 * (1 + 3 * i) for i in range(1000)]
    base, free = own_status()["persistent_bytes"], torch.cuda.mem_get_info()[0]
    blocks = [library.allocate(size) for size in sizes]
    with_blocks = own_status()["persistent_bytes"]
    for address in blocks:
        library.free(address)
    missing = [free - torch.cuda.mem_get_info()[0]]
    reserved = torch.cuda.memory_reserved()
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    with_tensors = own_status()["persistent_bytes"]
    reserved = torch.cuda.memory_reserved() - reserved
    del tensors
    torch.cuda.empty_cache()
    missing.append(free - torch.cuda.mem_get_info()[0])
    ready()
    return {"bytes": sum(sizes), "driver": with_blocks - base, "torch": with_tensors - base, "reserved": reserved,
            "missing": missing}


def info() -> dict:
    training = Training()
    training.warm_up()
    first = torch.cuda.mem_get_info()
    tensor = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    second = torch.cuda.mem_get_info()
    del tensor
    torch.cuda.empty_cache()
    third = torch.cuda.mem_get_info()
    ready()
    return {"first": first, "second": second, "third": third, "reserved": torch.cuda.memory_reserved()}


def fraction() -> dict:
    """A bound of 120 MiB, as a share of what torch says that there is, while segments become expandable and fixed again."""
    tensor = torch.empty(1, device="cuda")
    mib, reserved = 1 << 20, torch.cuda.memory_reserved()
    sizes = [torch.cuda.mem_get_info()[1], torch.cuda.get_device_properties(0).total_memory]
    torch.cuda.set_per_process_memory_fraction((120 * mib + reserved) / sizes[0])

    def allocate(amount: int, expandable: bool) -> torch.Tensor:
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable},max_split_size_mb:40")
        return torch.empty(amount * mib, dtype=torch.uint8, device="cuda")

    held, raised = [allocate(40, False), allocate(40, True), allocate(40, False)], []
    for amount in (40, 120):
        try:
            allocate(amount, False)
            raised.append("")
        except torch.OutOfMemoryError as why:
            raised.append(str(why))
        held.clear()
    ready()
    return {"sizes": sizes, "raised": raised, "one": tensor.numel()}


def history() -> dict:
    said = {}
    for context in ("alloc", "all"):
        torch.cuda.empty_cache()
        torch.cuda.memory._record_memory_history(context=context)
        torch.rand(3, 4, device="cuda")
        torch.cuda.empty_cache()
        traces = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(None)
        freed = [entry for trace in traces for entry in trace if entry["action"] == "segment_free"]
        said[context] = {"freed": len(freed), "by": "empty_cache" in str(freed)}
    ready()
    return said


def ipc() -> dict:
    from torch.multiprocessing.reductions import reduce_tensor

    training, raised = Training(), []

    def send(tensor: torch.Tensor) -> None:
        try:
            reduce_tensor(tensor)
            raised.append("")
        except RuntimeError as why:
            raised.append(str(why))

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = training.model(x)
        send(y.detach())
        return y.square().mean()

    send(training.x)
    training.warm_up()
    training(loss)
    ready()
    return {"raised": raised, "sum": torch.ones(1024, device="cuda").sum().item()}


if __name__ == "__main__":
    run(foreign, small, info, fraction, history, ipc)
