"""A program that keeps memory of the device and checks what is in it, in a process of `sluice run`; knows nothing of parking.

    python -S parking_job.py MIB [SEED [virtual]]

With "virtual" it makes and maps the memory itself (cuMemCreate), all of it at once, as JAX does.

Works until its standard input ends. Prints "ready" when all memory has its pattern, and in the end a JSON object: rounds, and each byte that was not right.
"""

import ctypes
import json
import random
import sys
import threading

import cuda_program
from cuda_program import check, cuda, enter_context, map_own

MIB = 1 << 20
PIECE = 4 * MIB  # of one allocation, so that chunks hold several
PAGE = 4096
MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
ends = threading.Event()
virtual = sys.argv[3:] == ["virtual"]
own: list[int] = []  # addresses of what it has mapped and does not use


def allocate(size: int) -> int:
    if own:
        return own.pop()
    return cuda_program.allocate(size).value


class Piece:
    def __init__(self, number: int):
        self.address = allocate(PIECE)
        self.number = number
        self.generation = 0
        self.write()

    def pattern(self) -> bytes:
        return (self.number * 1_000_003 + self.generation).to_bytes(8, "little") * (PAGE // 8)

    def write(self) -> None:
        self.generation += 1
        content = self.pattern() * (PIECE // PAGE)
        check(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), content, ctypes.c_size_t(PIECE)))

    def wrong_pages(self) -> int:
        found = ctypes.create_string_buffer(PIECE)
        check(cuda.cuMemcpyDtoH_v2(found, ctypes.c_uint64(self.address), ctypes.c_size_t(PIECE)))
        content, page = found.raw, self.pattern()
        return sum(content[at:at + PAGE] != page for at in range(0, PIECE, PAGE))

    def is_on_the_device(self) -> bool:
        """As libraries ask before they launch a kernel."""
        kind = ctypes.c_uint()
        check(cuda.cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, ctypes.c_uint64(self.address + PIECE // 2)))
        return kind.value == 2  # CU_MEMORYTYPE_DEVICE

    def free(self) -> None:
        if virtual:
            own.append(self.address)
            return
        check(cuda.cuMemFree_v2(ctypes.c_uint64(self.address)))


def work(pieces: list[Piece], seed: int, result: dict) -> None:
    chance = random.Random(seed)
    check(cuda.cuCtxSetCurrent(context))
    while not ends.is_set():
        at = chance.randrange(len(pieces))
        assert pieces[at].is_on_the_device()
        if wrong := pieces[at].wrong_pages():
            print(f"{wrong} wrong pages in piece {pieces[at].number}", file=sys.stderr, flush=True)  # it may not come to its end
            result["wrong pages"] += wrong
        what = chance.random()
        if what < 0.5:
            pieces[at].write()
        elif what < 0.6:
            pieces[at].free()
            pieces[at] = Piece(pieces[at].number)
        result["rounds"] += 1
    result["ended"] = True


if __name__ == "__main__":
    mib, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    context = enter_context()
    if virtual:
        first = map_own(mib * MIB)
        check(cuda.cuMemSetAccess(ctypes.c_uint64(first), ctypes.c_size_t(mib * MIB), (ctypes.c_int * 3)(1, 0, 3), ctypes.c_size_t(1)))
        own.extend(first + at for at in range(0, mib * MIB, PIECE))
    everything = [Piece(seed * 1_000_000 + number) for number in range(mib * MIB // PIECE)]
    print("ready", flush=True)
    results = [{"rounds": 0, "wrong pages": 0} for _ in range(2)]
    parts = [everything[::2], everything[1::2]]  # threads that share chunks
    threads = [threading.Thread(target=work, args=(part, 2 * seed + which, results[which]))
               for which, part in enumerate(parts)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ends.set()
    for thread in threads:
        thread.join()
    left = sum(piece.wrong_pages() for part in parts for piece in part)
    assert all("ended" in one for one in results), "a thread has failed"
    print(json.dumps({"rounds": sum(one["rounds"] for one in results),
                      "wrong pages": left + sum(one["wrong pages"] for one in results)}), flush=True)
