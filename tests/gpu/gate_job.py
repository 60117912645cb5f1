"""A training process that the tests of the gate start, with the gate preloaded or without.

    python3 gate_job.py train | compile | graph | hold | abort | bypass | program | counter | units [--deferred]

With --deferred calls that find no room are left to the gate's submitter. It prints one JSON object. What needs the gate's
own table says so by failing without it.
"""

import ctypes
import hashlib
import json
import random
import sys
import threading
import time

import torch

CLOSE_SECONDS = 5.0
DEFERRED = "--deferred" in sys.argv
TIGHT_NS = 50_000  # a bound that launches meet


class LongUnit(ctypes.Structure):
    """struct sluice_gate_long_unit of abi/gate_api.h."""

    _fields_ = [("name", ctypes.c_char * 120), ("nanoseconds", ctypes.c_int64), ("times", ctypes.c_uint64)]


class Table(ctypes.Structure):
    """struct sluice_gate_api of abi/gate_api.h."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("real", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)),
        ("close", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
        ("wait_idle", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
        ("open", ctypes.CFUNCTYPE(None)),
        ("abort_begin", ctypes.CFUNCTYPE(None)),
        ("abort_end", ctypes.CFUNCTYPE(None)),
        ("exempt_thread", ctypes.CFUNCTYPE(None, ctypes.c_int)),
        ("protect_thread", ctypes.CFUNCTYPE(None, ctypes.c_int)),
        ("set_pause_word", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("set_urgent", ctypes.CFUNCTYPE(None, ctypes.c_int)),
        ("set_run_ahead", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("launches", ctypes.CFUNCTYPE(ctypes.c_uint64)),
        ("expendable_thread", ctypes.CFUNCTYPE(None, ctypes.c_int)),
        ("unit_ended", ctypes.CFUNCTYPE(ctypes.c_int64)),
        ("set_demand_word", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("demand_answered", ctypes.CFUNCTYPE(None, ctypes.c_uint64)),
        ("demand_seen", ctypes.CFUNCTYPE(ctypes.c_int64)),
        ("set_deferred", ctypes.CFUNCTYPE(None, ctypes.c_int)),
        ("flush", ctypes.CFUNCTYPE(None)),
        ("deferred", ctypes.CFUNCTYPE(ctypes.c_uint64)),
        ("flushes", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)),
        ("commit_begin", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)),
        ("commit_end", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
        ("commit_resolve", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
        ("mark_units", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("long_unit", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(LongUnit))),
        ("commit_made", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
    ]


def gate() -> Table | None:
    """The gate's table, or None in a process without the gate."""
    library = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "sluice_gate_table"):
        return None
    library.sluice_gate_table.restype = ctypes.POINTER(Table)
    return library.sluice_gate_table().contents


def bound(table: Table, nanoseconds: int) -> None:
    """Bounds run-ahead, in the way that the command line says."""
    table.set_run_ahead(0)
    table.set_deferred(int(DEFERRED))
    table.set_run_ahead(nanoseconds)


def soon() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(CLOSE_SECONDS * 1e9)


class Training:
    """A small convolution net on random data, deterministic."""

    def __init__(self):
        torch.manual_seed(1)
        torch.use_deterministic_algorithms(True)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(32, 3, 32, 32).cuda()
        self.labels = torch.randint(0, 10, (32,)).cuda()

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train() -> dict:
    training = Training()
    losses = [training.step() for _ in range(20)]
    table = gate()
    if table is not None:
        bound(table, 1_000)  # hardly a launch finds room
    losses += [training.step() for _ in range(20)]
    return {"losses": [loss.hex() for loss in losses],
            "launches": table.launches() if table is not None else None,
            "deferred": table.deferred() if table is not None else None}


def compiled() -> dict:
    function = torch.compile(lambda a, b: (torch.relu(a @ b) * 2 + 1).sum())
    a = torch.arange(64.0).reshape(8, 8).cuda()
    plain = (torch.relu(a @ a.T) * 2 + 1).sum().item()
    before = gate().launches()
    result = function(a, a.T).item()
    return {"close": abs(result - plain) <= 1e-5 * abs(plain), "launches": gate().launches() - before}


def graph() -> dict:
    table = gate()
    bound(table, TIGHT_NS)
    source = torch.zeros(1000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _ = (source + 1).relu() * 3
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = (source + 1).relu() * 3
    sums = []
    for value in (0.0, 1.0, 2.0):
        source.fill_(value)
        before = table.launches()
        recorded.replay()
        sums.append((result.sum().item(), table.launches() > before))
    return {"sums": [s for s, _ in sums], "counted": all(c for _, c in sums)}


def hold() -> dict:
    """Closes and opens the gate while another thread launches, a hundred times."""
    table = gate()
    if DEFERRED:
        bound(table, TIGHT_NS)
    a = torch.randn(512, 512, device="cuda")
    stop = threading.Event()

    def launch():
        b = a
        while not stop.is_set():
            b = torch.tanh(b @ a)
        torch.cuda.synchronize()

    thread = threading.Thread(target=launch)
    before = table.launches()
    thread.start()
    while table.launches() == before:
        time.sleep(0)
    held, pauses = True, []
    for _ in range(100):
        started = time.perf_counter()
        assert table.close(soon()) == 0
        assert table.wait_idle(soon()) == 0
        pauses.append(time.perf_counter() - started)
        count = table.launches()
        deadline = time.perf_counter() + 1e-3
        while time.perf_counter() < deadline:
            held = held and table.launches() == count
        table.open()
        while table.launches() == count:
            time.sleep(0)
    stop.set()
    thread.join()
    pauses.sort()
    return {"held": held, "pause_median_us": pauses[len(pauses) // 2] * 1e6,
            "pause_max_us": pauses[-1] * 1e6, "launches": table.launches() - before}


class Counter:
    """A kernel that adds one to a word of pinned memory, launched from a thread of its own until it is told to stop."""

    PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry count(.param .u64 where) {
  .reg .u64 %address, %value;
  ld.param.u64 %address, [where];
  ld.volatile.global.u64 %value, [%address];
  add.u64 %value, %value, 1;
  st.volatile.global.u64 [%address], %value;
  ret;
}
"""

    def __init__(self) -> None:
        torch.cuda.current_stream().synchronize()  # torch's context is current
        self.driver = ctypes.CDLL("libcuda.so.1")
        module, self.function, where = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), self.PTX)
        self.call("cuModuleGetFunction", ctypes.byref(self.function), module, b"count")
        self.call("cuMemHostAlloc", ctypes.byref(where), ctypes.c_size_t(8), 0)
        self.word = ctypes.c_uint64.from_address(where.value)
        self.word.value = 0
        self.address = ctypes.c_uint64(where.value)
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.address))
        self.stop = threading.Event()
        self.launched = 0
        self.thread = threading.Thread(target=self.run)

    def call(self, name: str, *arguments) -> None:
        result = getattr(self.driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def run(self) -> None:
        torch.cuda.set_device(0)
        torch.cuda.current_stream().synchronize()
        while not self.stop.is_set():
            self.call("cuLaunchKernel", self.function, 1, 1, 1, 1, 1, 1, 0, None, self.parameters, None)
            self.launched += 1
        torch.cuda.synchronize()


def counter() -> dict:
    """Ten thousand pauses of a thread that counts on the device: nothing is counted in any of them."""
    table = gate()
    if DEFERRED:
        bound(table, TIGHT_NS)
    counting = Counter()
    counting.thread.start()
    counted_in_pauses, pauses = 0, 0
    while pauses < 10_000:
        assert table.close(soon()) == 0
        assert table.wait_idle(soon()) == 0
        before = counting.word.value
        until = time.perf_counter() + 5e-5
        while time.perf_counter() < until:
            pass
        counted_in_pauses += counting.word.value - before
        pauses += 1
        table.open()
        while counting.word.value == before:
            time.sleep(0)
    counting.stop.set()
    counting.thread.join()
    return {"pauses": pauses, "counted_in_pauses": counted_in_pauses,
            "counted": counting.word.value, "launched": counting.launched}


def units() -> dict:
    """What takes longer than the bound, by name."""
    table = gate()
    bound(table, TIGHT_NS)
    large, small = torch.zeros(1 << 28, device="cuda"), torch.zeros(1 << 10, device="cuda")
    for _ in range(100):
        large.sin_()
        small.cos_()
    torch.cuda.synchronize()
    found, unit = [], LongUnit()
    while table.long_unit(len(found), ctypes.byref(unit)):
        found.append((unit.name.decode(), unit.nanoseconds / 1e3, unit.times))
    return {"units": found}


def abort() -> dict:
    """Refuses launches in the middle of steps; each time torch raises, and the next step is right."""
    table = gate()
    if DEFERRED:
        bound(table, TIGHT_NS)
    training = Training()
    training.step()
    raised = 0
    for _ in range(10):
        table.expendable_thread(1)
        table.abort_begin()
        try:
            training.step()
        except RuntimeError:
            raised += 1
        table.abort_end()
        table.expendable_thread(0)
        torch.cuda.synchronize()
    loss = training.step()
    return {"raised": raised, "finite": loss == loss and abs(loss) < 100}


def bypass() -> dict:
    """Whether everything that torch launches was seen: the profiler counts what reached the device."""
    table = gate()
    training = Training()
    training.step()
    torch.cuda.synchronize()
    before = table.launches()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        training.step()
        torch.cuda.synchronize()
    on_device = sum(e.count for e in profile.key_averages()
                    if e.device_type == torch.autograd.DeviceType.CUDA)
    return {"seen": table.launches() - before, "on_device": on_device}


class Program:
    """Random work of one thread on streams of its own, whose result depends on its order; all that it decides follows from
    its seed."""

    WIDTH = 256
    LANES = 3

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.digest = hashlib.sha256()
        self.streams = [torch.cuda.Stream() for _ in range(self.LANES)]
        self.values = [torch.full((self.WIDTH, self.WIDTH), lane + 1, dtype=torch.int64, device="cuda")
                       for lane in range(self.LANES)]
        self.pinned = torch.zeros(self.WIDTH, dtype=torch.int64).pin_memory()
        self.copied = torch.cuda.Event()
        self.graphs = [self._captured(lane) for lane in range(self.LANES)]
        torch.cuda.synchronize()

    def _captured(self, lane: int) -> torch.cuda.CUDAGraph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=self.streams[lane]):
            self.values[lane].mul_(7).add_(lane)
            self.values[lane][:8].zero_()
        return recorded

    def run(self, operations: int) -> str:
        chosen = [self.multiply] * 12 + [self.clear] * 2 + [self.shift] * 4 + [self.exchange] * 4 + [self.fill] * 2 + [
            self.fill_from_pinned] + [self.read] + [self.borrow] * 2 + [self.replay] * 2 + [self.wait]
        for _ in range(operations):
            lane = self.dice.randrange(self.LANES)
            with torch.cuda.stream(self.streams[lane]):
                self.dice.choice(chosen)(lane)
        torch.cuda.synchronize()
        for value in self.values:
            self.digest.update(value.cpu().numpy().tobytes())
        return self.digest.hexdigest()

    def multiply(self, lane: int) -> None:
        self.values[lane].mul_(2 * self.dice.randrange(100) + 1).add_(self.dice.randrange(1000))

    def clear(self, lane: int) -> None:
        self.values[lane][self.dice.randrange(self.WIDTH)].zero_()

    def shift(self, lane: int) -> None:
        value = self.values[lane]
        value[1:65].copy_(value[128:192])

    def exchange(self, lane: int) -> None:
        """Takes another lane's values at this point of the program."""
        other = self.dice.randrange(self.LANES)
        self.streams[lane].wait_stream(self.streams[other])
        self.values[lane].add_(self.values[other], alpha=3)
        self.streams[other].wait_stream(self.streams[lane])

    def fill(self, lane: int) -> None:
        self.values[lane][5].copy_(torch.full((self.WIDTH,), self.dice.randrange(1000), dtype=torch.int64))

    def fill_from_pinned(self, lane: int) -> None:
        self.copied.synchronize()
        self.pinned.fill_(self.dice.randrange(1000))
        self.values[lane][9].copy_(self.pinned, non_blocking=True)
        self.copied.record()

    def read(self, lane: int) -> None:
        self.digest.update(str(self.values[lane][3, 3].item()).encode())

    def borrow(self, lane: int) -> None:
        """Memory that is freed while another stream may still use it."""
        other = (lane + 1) % self.LANES
        borrowed = self.values[lane] * 3
        self.streams[other].wait_stream(self.streams[lane])
        with torch.cuda.stream(self.streams[other]):
            self.values[other].sub_(borrowed)
        borrowed.record_stream(self.streams[other])

    def replay(self, lane: int) -> None:
        self.graphs[lane].replay()

    def wait(self, lane: int) -> None:
        self.streams[lane].synchronize()


def disturb(table: Table, stop: threading.Event) -> None:
    """Bounds, pauses and lets go at random instants."""
    dice = random.Random(5)
    table.exempt_thread(1)
    while not stop.is_set():
        if dice.random() < 0.5:
            bound(table, dice.choice((0, 20_000, TIGHT_NS, 200_000)))
        elif table.close(soon()) == 0:
            assert table.wait_idle(soon()) == 0
            table.open()
        time.sleep(dice.random() * 5e-3)


def program() -> dict:
    """Random programs in three threads; with the gate, disturbed."""
    table = gate()
    programs = [Program(seed) for seed in range(3)]
    digests: list[str] = [""] * len(programs)

    def run(number: int) -> None:
        digests[number] = programs[number].run(40_000)

    stop = threading.Event()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(programs))]
    disturber = threading.Thread(target=disturb, args=(table, stop)) if table else None
    for thread in [*threads, disturber] if disturber else threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    if disturber:
        disturber.join()
    return {"digests": digests, "deferred": table.deferred() if table else None}


if __name__ == "__main__":
    modes = {"train": train, "compile": compiled, "graph": graph, "hold": hold, "abort": abort,
             "bypass": bypass, "program": program, "counter": counter, "units": units}
    print(json.dumps(modes[sys.argv[1]]()))
