"""Asks the CUDA driver for memory as libraries do, in a process of `sluice run`; prints a JSON object.

    python -S driver_memory_job.py
"""

import ctypes
import json
import os
import threading

from cuda_program import check, cuda, map_own

runtime = ctypes.CDLL(os.environ["SLUICE_RUNTIME_LIBRARY"])
runtime.sluice_arena_alloc.restype = ctypes.c_void_p
runtime.sluice_arena_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
runtime.sluice_arena_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

MIB = 1 << 20


def allocate(size: int) -> tuple[int, int]:
    """The driver's answer and the address."""
    address = ctypes.c_uint64()
    return cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), address.value


def free(address: int) -> None:
    check(cuda.cuMemFree_v2(ctypes.c_uint64(address)))


def free_later(address: int, stream: ctypes.c_void_p) -> int:
    return cuda.cuMemFreeAsync(ctypes.c_uint64(address), stream)


def memory() -> list[int]:
    """Free and total MiB."""
    found = ctypes.c_size_t(), ctypes.c_size_t()
    check(cuda.cuMemGetInfo_v2(*map(ctypes.byref, found)))
    return [each.value // MIB for each in found]


def total() -> int:
    """MiB of the device."""
    found = ctypes.c_size_t()
    check(cuda.cuDeviceTotalMem_v2(ctypes.byref(found), 0))
    return found.value // MIB


def handle_of(address: int) -> int:
    handle = ctypes.create_string_buffer(64)
    return cuda.cuIpcGetMemHandle(handle, ctypes.c_uint64(address))


def ways_to(address: int) -> list[int]:
    """The driver's answers to who wants a handle of that memory or to change its mapping."""
    handle, descriptor, at, size = ctypes.c_uint64(), ctypes.c_int(-1), ctypes.c_uint64(address), ctypes.c_size_t(64 * MIB)
    access = (ctypes.c_int * 3)(1, 1, 3)  # another device reads and writes
    return [cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), at),
            cuda.cuMulticastBindAddr(handle, ctypes.c_size_t(0), at, size, ctypes.c_uint64(0)),
            cuda.cuMemMap(at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)),
            cuda.cuMemSetAccess(at, size, access, ctypes.c_size_t(1)),
            cuda.cuMemUnmap(at, size),
            cuda.cuMemGetHandleForAddressRange(ctypes.byref(descriptor), at, size, 1, ctypes.c_uint64(0))]


said = {}
check(cuda.cuInit(0))
said["totals"] = [total()]
context = ctypes.c_void_p()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))

said["at first"] = memory()
said["totals"] += [total(), said["at first"][1]]
_, mine = allocate(10 * MIB)
said["with 10 MiB"] = memory()
segment = runtime.sluice_arena_alloc(100 * MIB, 0, None)  # two chunks of 64 MiB
said["with an arena"] = memory()
said["handles"] = [handle_of(mine), handle_of(segment), handle_of(mine)]
said["ways"] = [ways_to(mine), ways_to(segment), ways_to(segment)]
said["own"] = ways_to(map_own(64 * MIB))
runtime.sluice_arena_free(segment, 100 * MIB, 0, None)
said["with an idle arena"] = memory()
free(mine)
said["after all"] = memory()
everything, address = allocate(memory()[0] * MIB)
said["all that is free"] = everything
said["nothing left"] = memory()
free(address)
said["too much"] = [allocate(1 << 40)[0], allocate(1 << 62)[0]]

# What outlives its commit keeps its arena.
runtime.sluice_begin(4, 4)
segments = [runtime.sluice_arena_alloc(50 * MIB, 0, None) for _ in range(4)]  # of 64 MiB each chunk holds one and a bit
before = runtime.sluice_generation()
assert runtime.sluice_commit_begin(0) == 1
runtime.sluice_commit_end(4, 1)
assert runtime.sluice_commit_resolve(0) == 1
said["generations"] = runtime.sluice_generation() - before
said["kept"] = memory()
runtime.sluice_arena_free(segments[3], 50 * MIB, 0, None)  # the chunks at the end hold nothing any more
said["kept in part"] = memory()
for segment in segments[:3]:
    runtime.sluice_arena_free(segment, 50 * MIB, 0, None)
said["kept no more"] = memory()

# Small allocations share chunks.
sizes = [1024 * (1 + 37 * i % 3072) for i in range(100)]
blocks = [allocate(size) for size in sizes]
said["small"] = {"results": [result for result, _ in blocks], "bytes": sum(sizes),
                 "held": memory()[1] - memory()[0]}
for _, address in blocks:
    free(address)
said["small freed"] = memory()

# Memory is freed by one thread while another one captures.
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
_, mine = allocate(10 * MIB)
segment = runtime.sluice_arena_alloc(100 * MIB, 0, None)
runtime.sluice_begin(4, 4)
assert runtime.sluice_commit_begin(0) == 1
runtime.sluice_commit_end(4, 1)  # the segment's arena is a former one
assert runtime.sluice_commit_resolve(0) == 1
check(cuda.cuStreamBeginCapture_v2(stream, 1))


def free_both() -> None:
    check(cuda.cuCtxSetCurrent(context))
    free(mine)
    runtime.sluice_arena_free(segment, 100 * MIB, 0, None)


other = threading.Thread(target=free_both)
other.start()
other.join()
said["capture"] = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
said["freed beside a capture"] = memory()

# What is the pool's is freed in a stream's order, too; not by a capture.
_, first = allocate(10 * MIB)
_, second = allocate(10 * MIB)
check(cuda.cuMemsetD8Async(ctypes.c_uint64(first), ctypes.c_uint8(1), ctypes.c_size_t(10 * MIB), stream))
said["freed in order"] = [free_later(first, stream), free_later(second + MIB, stream), free_later(first, stream)]
said["beside what was freed in order"] = memory()
check(cuda.cuStreamBeginCapture_v2(stream, 1))
said["freed in order"].append(free_later(second, stream))
cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
said["freed in order"].append(free_later(second, ctypes.c_void_p(2)))  # the thread's own stream
said["after what was freed in order"] = memory()

place = ctypes.byref(ctypes.c_uint64())
said["other memory"] = [cuda.cuMemAllocManaged(place, ctypes.c_size_t(MIB), 1),
                        cuda.cuMemAllocHost_v2(place, ctypes.c_size_t(MIB)),
                        cuda.cuMemAllocAsync(place, ctypes.c_size_t(MIB), None),
                        cuda.cuMemAllocAsync(place, ctypes.c_size_t(MIB), None)]
said["beside other memory"] = memory()
print(json.dumps(said))
