"""A training process that the tests of the gate start, with the gate preloaded or without.

    python3 gate_job.py train | compile | graph | hold | abort | bypass

It prints one JSON object. What needs the gate's own table says so by failing without it.
"""

import ctypes
import json
import sys
import threading
import time

import torch

CLOSE_SECONDS = 5.0


class Table(ctypes.Structure):
    """struct sluice_gate_api of runtime/gate/gate_api.h."""

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
        ("set_window", ctypes.CFUNCTYPE(None, ctypes.c_uint, ctypes.c_uint)),
        ("launches", ctypes.CFUNCTYPE(ctypes.c_uint64)),
        ("expendable_thread", ctypes.CFUNCTYPE(None, ctypes.c_int)),
    ]


def gate() -> Table | None:
    """The gate's table, or None in a process without the gate."""
    library = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "sluice_gate_table"):
        return None
    library.sluice_gate_table.restype = ctypes.POINTER(Table)
    return library.sluice_gate_table().contents


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
        table.set_window(2, 2)
    losses += [training.step() for _ in range(20)]
    return {"losses": [loss.hex() for loss in losses],
            "launches": table.launches() if table is not None else None}


def compiled() -> dict:
    function = torch.compile(lambda a, b: (torch.relu(a @ b) * 2 + 1).sum())
    a = torch.arange(64.0).reshape(8, 8).cuda()
    plain = (torch.relu(a @ a.T) * 2 + 1).sum().item()
    before = gate().launches()
    result = function(a, a.T).item()
    return {"close": abs(result - plain) <= 1e-5 * abs(plain), "launches": gate().launches() - before}


def graph() -> dict:
    table = gate()
    table.set_window(1, 1)
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


def abort() -> dict:
    """Refuses launches in the middle of steps; each time torch raises, and the next step is right."""
    table = gate()
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


if __name__ == "__main__":
    modes = {"train": train, "compile": compiled, "graph": graph, "hold": hold, "abort": abort,
             "bypass": bypass}
    print(json.dumps(modes[sys.argv[1]]()))
