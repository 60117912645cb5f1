"""Jobs about the step arena and what torch says of it; see memory_training.py."""

from __future__ import annotations

import gc
import pickle
import threading
from collections import Counter
from collections.abc import Callable

from memory_training import (  # first: sets up CUDA
    MIB,
    UNTIL,
    WARM_UP_STEPS,
    WIDTH,
    Training,
    is_rehearsal,
    own_status,
    ready,
    run,
)

import torch
from exact_job import network
from exact_ranks_job import Block
from jobs import Deep

import sluice


def watched(training: Training, loss: Callable | None = None) -> dict:
    """torch's own figures after every step that followed a discard, beside those of undisturbed steps."""
    training.warm_up(loss)
    base = (torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
    seen: list[tuple[int, int]] = []
    discards = training.discards

    def look() -> None:
        nonlocal discards
        if training.discards != discards:
            discards = training.discards
            seen.append((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))

    training.until_told(loss, look)
    return {"base": base, "seen": seen, "discards": discards}


def stats() -> dict:
    return watched(Training())


def side_streams() -> dict:
    training, side = Training(), torch.cuda.Stream()

    def loss(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        first = x * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second = first + 1
        first.record_stream(side)
        del first
        main.wait_stream(side)
        second.record_stream(main)
        return training.plain_loss(second)

    return watched(training, loss)


def growing() -> dict:
    """Each of some tensors is larger than all that was freed before it. Bytes of segments in the arena, by step."""
    training, side = Training(), torch.cuda.Stream()
    main = torch.cuda.current_stream()
    values: list[float] = []
    segments: dict[str, list[int]] = {"one stream": [], "two streams": []}

    def loss(x: torch.Tensor, on: torch.cuda.Stream = main) -> torch.Tensor:
        mean = torch.zeros((), device="cuda")
        if not is_rehearsal(x):
            on.wait_stream(main)
            with torch.cuda.stream(on):
                for mib in range(64, 769, 64):
                    mean = mean + torch.ones(mib * MIB // 4, device="cuda").mean()
            main.wait_stream(on)
        return training.plain_loss(x) + mean

    def train(steps: int, loss: Callable, where: str) -> None:
        for _ in range(steps):
            values.append(training(loss))
            segments[where].append(training.step._engine.runtime.arena_peak())

    train(WARM_UP_STEPS, loss, "one stream")
    training.until_told(loss, lambda: train(1, loss, "one stream"))
    # What was made for all of a micro-batch is of no use to another stream.
    train(WARM_UP_STEPS, lambda x: loss(x, side), "two streams")
    return {"segments": segments, "values": values, "discards": training.discards}


def snapshot() -> dict:
    training = Training()
    torch.cuda.memory._record_memory_history(max_entries=20_000, stacks="python")
    segments, last = Counter(), 0

    def loss(x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        y = training.model(x)
        if not is_rehearsal(x):
            last = y.data_ptr()
            around = [each for each in torch.cuda.memory_snapshot()
                      if each["address"] <= last < each["address"] + each["total_size"]]
            pool = tuple(training.step._arena._pool.id)
            segments["of the arena" if [tuple(each["segment_pool_id"]) for each in around] == [pool] else "other"] += 1
        return y.square().mean()

    training.warm_up(loss)
    training.until_told(loss)
    whole = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    trace = whole["device_traces"][torch.cuda.current_device()]
    return {"segments": segments, "actions": Counter(entry["action"] for entry in trace),
            "traced": any(entry["action"] == "alloc" and entry["addr"] == last for entry in trace),
            "pickled": len(pickle.dumps(whole)), "discards": training.discards}


def shortage() -> dict:
    """Samples that need about 1.5 GiB each, eight at once, in a pool of 6 GiB."""
    weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.item()))
    step = sluice.Step(torch.nn.ParameterList([weight]), optimizer, micro_batch=8)
    x = torch.arange(1.0, 9.0, device="cuda").reshape(8, 1)

    def loss(x: torch.Tensor, columns: int = 1 << 27) -> torch.Tensor:
        return (x * weight).repeat(1, columns).square().mean()

    value = step(loss, x).item()
    after = step.stats()
    try:
        step(lambda x: loss(x, 1 << 31), x[:1])
        refused = None
    except sluice.OutOfMemory as why:
        refused = str(why)
    again = step(loss, x).item()
    ready()
    return {"value": value, "again": again, "expected": (x * x).mean().item(), "gradient": seen[-1],
            "stats": after, "refused": refused}


def cache_release() -> dict:
    training = Training()
    training.warm_up()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    parts = [torch.empty(free // 10, dtype=torch.uint8, device="cuda") for _ in range(8)]
    left, _ = torch.cuda.mem_get_info()
    del parts  # torch keeps them cached
    cached, _ = torch.cuda.mem_get_info()
    whole = torch.empty(free * 7 // 10, dtype=torch.uint8, device="cuda")
    del whole
    torch.cuda.empty_cache()
    try:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        outside = None
    except torch.OutOfMemoryError as why:
        outside = str(why)

    class Greedy(torch.optim.SGD):
        def step(self, closure: Callable | None = None) -> None:
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")

    training.step.optimizer = Greedy(training.model.parameters(), lr=1e-4)
    try:
        training()
        inside = None
    except torch.OutOfMemoryError as why:
        inside = str(why)
    ready()
    return {"free": free, "left": left, "cached": cached, "total": total, "outside": outside, "inside": inside}


def graphs() -> dict:
    """One graph captured before training, one in its first micro-batch; both replayed in all that follow."""
    training = Training()
    rows = training.x[:1024]
    before_in = torch.zeros_like(rows)
    inside_in = torch.full((1024, 1024), 0.5, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _ = before_in * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    before = torch.cuda.CUDAGraph()
    with torch.cuda.graph(before):
        before_out = before_in * 2 + 1
    inside: list = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = training.model(x)
        if is_rehearsal(x):
            return y.square().mean()
        if not inside:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = inside_in * 3
            inside.extend((graph, out))
        before_in.copy_(x[:1024])
        before.replay()
        inside[0].replay()
        return before_out.mean() + inside[1].mean() + 0.0 * y.square().mean()

    values = []
    training.warm_up(loss)
    training.until_told(lambda x: loss(x), lambda: values.append(training.step(loss, training.x).item()))
    return {"values": values, "expected": (2 * rows.mean() + 1 + 1.5).item(), "discards": training.discards}


def threads() -> dict:
    """Another thread trains a model of its own, in plain PyTorch; afterwards this thread does the same again."""
    torch.use_deterministic_algorithms(True)
    training = Training()
    training.warm_up()
    steps_a_digest = 20
    failures: list[str] = []
    stop = threading.Event()

    def digests(count: int | None) -> list[float]:
        """So many, or until told to stop."""
        generator = torch.Generator(device="cuda").manual_seed(3)
        model = Deep(512, 4).cuda()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02, generator=generator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(512, 512, device="cuda", generator=generator)
        found: list[float] = []
        while not stop.is_set() if count is None else len(found) < count:
            for _ in range(steps_a_digest):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            found.append(sum(parameter.detach().double().sum().item() for parameter in model.parameters()))
        return found

    beside: list[float] = []

    def work() -> None:
        try:
            beside.extend(digests(None))
        except BaseException as why:
            failures.append(f"{type(why).__name__}: {why}")

    thread = threading.Thread(target=work)
    thread.start()
    training.until_told()
    stop.set()
    thread.join()
    alone = [] if failures else digests(len(beside))
    return {"failures": failures, "beside": [each.hex() for each in beside], "alone": [each.hex() for each in alone],
            "discards": training.discards}


def kept_of_commits() -> dict:
    """A tensor of a committed micro-batch lives on through the handovers that follow."""
    training = Training()
    kept: list[torch.Tensor] = []

    def keeping(x: torch.Tensor) -> torch.Tensor:
        y = training.model(x)
        kept[:] = [y.detach()]
        return y.square().mean()

    training.warm_up()
    training(keeping)
    held, reference = kept[0], kept[0].cpu()
    training.until_told()
    intact = torch.equal(held.cpu(), reference)
    before = own_status()["persistent_bytes"]
    kept.clear()
    del held
    torch.cuda.empty_cache()
    training()
    return {"intact": intact, "with": before, "without": own_status()["persistent_bytes"],
            "discards": training.discards}


def kept_of_discards() -> dict:
    """Until it is told that this cannot be, the loss function keeps what it computes."""
    training = Training()
    training.warm_up()
    kept: list[torch.Tensor] = []
    raised: list[str] = []

    def keeping(x: torch.Tensor) -> torch.Tensor:
        y = training.model(x)
        if not raised:
            kept[:] = [y]
        return y.square().mean()

    ready()
    while not UNTIL.exists():
        try:
            training(keeping)
        except sluice.Survivors as why:
            raised.append(str(why))
            kept.clear()
            gc.collect()
    kept.clear()
    return {"raised": raised, "loss": training(), "discards": training.discards}


def workspaces() -> dict:
    """Libraries work on streams that a micro-batch is the first to use, so that their workspaces are born in it."""
    training = Training()
    weight = torch.randn(WIDTH, WIDTH, device="cuda")
    kernel = torch.randn(8, 1, 3, 3, device="cuda")
    runs = 0

    def loss(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        if is_rehearsal(x):
            return training.plain_loss(x)
        runs += 1
        main, fresh = torch.cuda.current_stream(), torch.cuda.Stream(priority=-(runs % 2))
        fresh.wait_stream(main)
        with torch.cuda.stream(fresh):
            product = x @ weight
            convolved = torch.nn.functional.conv2d(x[:64].reshape(64, 1, 32, -1), kernel)
        main.wait_stream(fresh)
        for each in (product, convolved):
            each.record_stream(main)
        return training.plain_loss(x) + 1e-9 * (product.square().mean() + convolved.square().mean())

    losses: list[float] = []
    training.warm_up(loss)
    training.until_told(loss, lambda: losses.append(training(loss)))
    return {"finite": all(map(torch.isfinite, torch.tensor(losses))), "steps": len(losses),
            "discards": training.discards}


def compiled() -> dict:
    """Libraries that the first linear layer is the first to use find the convolutions' activations there."""
    model = Block(list(network(64)), checkpointed=False).cuda()
    model.compile()
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), adapt=False)
    x, y = torch.randn(2048, 3, 32, 32, device="cuda"), torch.zeros(2048, dtype=torch.int64, device="cuda")
    for _ in range(WARM_UP_STEPS):
        step(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), x, y)
    ready()
    return {"persistent": own_status()["persistent_bytes"], "needed": step._engine.runtime.arena_peak()}


if __name__ == "__main__":
    run(stats, side_streams, growing, snapshot, shortage, cache_release, graphs, threads, kept_of_commits, kept_of_discards,
        workspaces, compiled)
