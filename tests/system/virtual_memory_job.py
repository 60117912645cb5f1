"""What programs do with memory that they make and map themselves, in a process of `sluice run`; prints a JSON object of what came of it."""

import ctypes
import json
import os
import time

from cuda_program import check, cuda, enter_context, none

MIB = 1 << 20
CHUNK = 64 * MIB
PAGE = 4096


def size_of(mib: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(mib * MIB)


def create(mib: int) -> ctypes.c_uint64:
    handle = ctypes.c_uint64()
    check(cuda.cuMemCreate(ctypes.byref(handle), size_of(mib), (ctypes.c_int * 16)(1, 1, 1), none))
    return handle


def reserve(mib: int) -> int:
    address = ctypes.c_uint64()
    check(cuda.cuMemAddressReserve(ctypes.byref(address), size_of(mib), ctypes.c_size_t(0), none, none))
    return address.value


def map_at(address: int, mib: int, handle: ctypes.c_uint64) -> int:
    return cuda.cuMemMap(ctypes.c_uint64(address), size_of(mib), ctypes.c_size_t(0), handle, none)


def give_access(address: int, mib: int, device: int = 0) -> int:
    return cuda.cuMemSetAccess(ctypes.c_uint64(address), size_of(mib), (ctypes.c_int * 3)(1, device, 3), ctypes.c_size_t(1))


def unmap(address: int, mib: int) -> int:
    return cuda.cuMemUnmap(ctypes.c_uint64(address), size_of(mib))


def write(address: int, what: int) -> None:
    check(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address), bytes([what]) * PAGE, ctypes.c_size_t(PAGE)))


def read(address: int) -> int:
    found = ctypes.create_string_buffer(PAGE)
    check(cuda.cuMemcpyDtoH_v2(found, ctypes.c_uint64(address), ctypes.c_size_t(PAGE)))
    assert len(set(found.raw)) == 1
    return found.raw[0]


def held(wanted: int) -> int:
    """Chunks of the pool that this process has, by what it says is free. What is given back comes free a moment later."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    deadline = time.monotonic() + 120
    while True:
        check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        found = (total.value - free.value) // CHUNK
        if found == wanted or time.monotonic() > deadline:
            return found


def range_of(address: int) -> list:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    result = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return [result, base.value, size.value]


said = {}
enter_context()

handle = create(100)
said["made"] = held(2)
home = reserve(100)
check(map_at(home, 100, handle))
check(give_access(home, 100))
write(home + 99 * MIB, 7)
said["range"] = range_of(home + 99 * MIB) == [0, home, 100 * MIB]
retained = ctypes.c_uint64()
check(cuda.cuMemRetainAllocationHandle(ctypes.byref(retained), ctypes.c_void_p(home)))
said["the same handle"] = retained.value == handle.value
properties = (ctypes.c_int * 16)()
check(cuda.cuMemGetAllocationPropertiesFromHandle(properties, handle))
said["properties"] = list(properties[:4])
said["freed as cuMemAlloc's"] = cuda.cuMemFree_v2(ctypes.c_uint64(home))
said["a part of it"] = unmap(home, 50)
said["mapped there already"] = map_at(home, 100, handle)
check(unmap(home, 100))
other = reserve(100)
check(map_at(other, 100, handle))
check(give_access(other, 100))
said["mapped elsewhere"] = read(other + 99 * MIB)
check(cuda.cuMemRelease(handle))
check(cuda.cuMemRelease(handle))
said["released once more"] = cuda.cuMemRelease(handle)
said["released and mapped"] = [held(2), read(other + 99 * MIB)]
check(unmap(other, 100))
said["unmapped"] = held(0)
check(cuda.cuMemAddressFree(ctypes.c_uint64(home), size_of(100)))
said["addresses freed by another size"] = cuda.cuMemAddressFree(ctypes.c_uint64(other), size_of(128))
check(cuda.cuMemAddressFree(ctypes.c_uint64(other), size_of(100)))

exported = create(128)
home = reserve(128)
check(map_at(home, 128, exported))
check(give_access(home, 128))
write(home + 127 * MIB, 9)
said["to be exported"] = held(2)
descriptor = ctypes.c_int(-1)
check(cuda.cuMemExportToShareableHandle(ctypes.byref(descriptor), exported, 1, none))
said["exported"] = [held(0), read(home + 127 * MIB), os.fstat(descriptor.value).st_size == 128 * MIB]
write(home + 127 * MIB, 11)
check(unmap(home, 128))
check(map_at(home, 128, exported))
check(give_access(home, 128))
said["exported, mapped again"] = read(home + 127 * MIB)
check(unmap(home, 128))
check(cuda.cuMemRelease(exported))

# As allocators that grow do: parts of one range, not in chunks.
home = reserve(300)
parts = [create(100) for _ in range(3)]
for number, part in enumerate(parts):
    check(map_at(home + number * 100 * MIB, 100, part))
check(give_access(home, 300))
for number in range(3):
    write(home + (100 * number + 99) * MIB, 20 + number)
said["parts"] = [read(home + (100 * number + 99) * MIB) for number in range(3)]
said["parts of the pool"] = held(0)
check(unmap(home, 300))
for part in parts:
    check(cuda.cuMemRelease(part))
said["after all"] = held(0)
small = create(32)
said["less than a chunk"] = held(0)
huge = ctypes.c_uint64()
said["too much"] = cuda.cuMemCreate(ctypes.byref(huge), size_of(1 << 14), (ctypes.c_int * 16)(1, 1, 1), none)
print(json.dumps(said))
