"""What programs share that ask the CUDA driver themselves, in a process of `sluice run`."""

import ctypes

cuda = ctypes.CDLL("libcuda.so.1")  # the gate, which is preloaded
none = ctypes.c_uint64(0)


def check(result: int) -> None:
    assert result == 0, f"CUDA error {result}"


def enter_context() -> ctypes.c_void_p:
    """The first device's, which is current then."""
    context = ctypes.c_void_p()
    check(cuda.cuInit(0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(cuda.cuCtxSetCurrent(context))
    return context


def allocate(size: int) -> ctypes.c_uint64:
    """The address of so many bytes."""
    address = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    return address


def fill_later(address: ctypes.c_uint64, size: int) -> None:
    """Nobody waits for it."""
    check(cuda.cuMemsetD8Async(address, ctypes.c_uint8(1), ctypes.c_size_t(size), none))


def map_own(size: int) -> int:
    """The address of memory that the program makes and maps itself, all of it at once."""
    handle, address = ctypes.c_uint64(), ctypes.c_uint64()
    wanted = ctypes.c_size_t(size)
    properties = (ctypes.c_int * 16)(1, 1, 1)  # pinned, exportable as a descriptor, on a device
    check(cuda.cuMemCreate(ctypes.byref(handle), wanted, properties, none))
    check(cuda.cuMemAddressReserve(ctypes.byref(address), wanted, ctypes.c_size_t(0), none, none))
    check(cuda.cuMemMap(address, wanted, ctypes.c_size_t(0), handle, none))
    return address.value
