"""Functions of a test that several processes run, which gloo connects."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, multiprocessing

#: After so long every process says where it is, and ends.
PATIENCE_SECONDS = 160


def run(folder: Path, bodies: tuple[Callable[[int], None], ...], ranks: int) -> None:
    """Runs the functions, one after the other, with the rank of each process. Raises what one of them raises."""
    multiprocessing.spawn(_process, (folder, bodies, ranks), nprocs=ranks)


def names(bodies: tuple[Callable[[int], None], ...]) -> str:
    return " ".join(body.__name__ for body in bodies)


def _process(rank: int, folder: Path, bodies: tuple[Callable[[int], None], ...], ranks: int) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    for body in bodies:
        body(rank)
    distributed.destroy_process_group()
    os._exit(0)  # gloo's threads are at times not joined when Python ends, which aborts the process
