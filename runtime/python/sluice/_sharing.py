"""How a process comes to share the pool: whether it is to, what it needs for it, and the word on standard error if it cannot be.

Knows nothing of the rest of the package, since it is also loaded without it, where a program knows nothing of Sluice
(startup/sitecustomize.py); there it is the same module, so that a reason is given once.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from multiprocessing.context import SpawnProcess
from pathlib import Path

EXIT_WITHOUT_POOL = 125  # as `sluice run` where there can be none


def warn(reason: str, who: str = "this process") -> None:
    """Says why memory is not shared. A job that is never to train so (`--require-pool`) ends with it."""
    if os.environ.get("SLUICE_REQUIRE_POOL") != "1":
        print(f"sluice: {who} trains without sharing: {reason}", file=sys.stderr)
        return
    print(f"sluice: {who} cannot train without sharing, since --require-pool forbids it: {reason}", file=sys.stderr)
    if threading.current_thread() is not threading.main_thread():
        os._exit(EXIT_WITHOUT_POOL)  # else the thread alone would end
    raise SystemExit(EXIT_WITHOUT_POOL)


def is_data_worker() -> bool:
    """Whether this is a data loader's worker, which has no model to train."""
    import torch.utils.data

    return torch.utils.data.get_worker_info() is not None or (
        multiprocessing.parent_process() is not None and multiprocessing.current_process().daemon
    )


def library_path() -> str | None:
    """Of the runtime; None where this process is not to share."""
    path = os.environ.get("SLUICE_RUNTIME_LIBRARY")
    return path if os.environ.get("SLUICE_RUN") == "1" and path and not is_data_worker() else None


def _part_for_torch(runtime_library: Path) -> Path:
    """Where what is built against this torch lies, beside the libraries that know of none; may not exist."""
    import torch

    return runtime_library.parent / "_torch" / ".".join(torch.__version__.split(".")[:2])


@functools.cache
def check_torch() -> bool:
    """Whether Sluice was built for this torch, which matters under `sluice run` alone: says there what would mend it. Ends the
    process if that forbids to train without sharing."""
    path = library_path()
    if path is None:
        return True
    part = _part_for_torch(Path(path))
    if part.is_dir() or not Path(path).exists():  # without the runtime itself who opens it says so
        return True
    import torch

    built_for = sorted((each.name for each in part.parent.glob("*")), key=lambda name: (len(name), name))
    warn(f"its torch is {torch.__version__}, and Sluice was built for {', '.join(built_for) or 'none'}; build it for that, in its "
         f"sources: {sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps .")
    return False


def open_library(path: str) -> ctypes.CDLL | None:
    """The runtime's; None after a word if it cannot be opened. What is built against torch finds its functions in it."""
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as why:
        warn(f"cannot open {path}: {why}")
        return None


def open_host_part(path: str) -> ctypes.CDLL | None:
    """What replaces torch's CPU allocator, once the runtime's library is open; None after a word if it cannot be opened."""
    try:
        return ctypes.CDLL(str(_part_for_torch(Path(path)) / "libsluice_torch_host.so"))
    except OSError as why:
        warn(f"cannot open the library for torch on the host: {why}")
        return None


def install_on_host(part: ctypes.CDLL) -> bool:
    """Replaces it, once; False after a word if that cannot be."""
    if part.sluice_torch_host_install() != 0:
        warn("another CPU allocator is already in place")
        return False
    return True


class _Kin:
    """Of the children of multiprocessing, this process and what it forks: whether they are data workers is known when they have
    been forked, or unpickled where they were spawned."""

    def __init__(self, part: ctypes.CDLL) -> None:
        self._join_later = part.sluice_torch_host_join_later
        self._is_known = not hasattr(multiprocessing.current_process(), "_inheriting")
        self._join_later(1 if self._is_known else 0)
        multiprocessing.util.register_after_fork(self, _Kin.become)
        if not self._is_known:  # SpawnProcess runs nothing of that
            usual = getattr(SpawnProcess, "_after_fork")

            def after_fork() -> None:
                usual()
                self.become()

            setattr(SpawnProcess, "_after_fork", staticmethod(after_fork))

    def become(self) -> None:
        if is_data_worker():
            self._join_later(0)
        elif not self._is_known:
            self._join_later(1)
        self._is_known = True  # and what is forked inherits it


_kin: _Kin | None = None  # multiprocessing keeps none alive


def share_later() -> None:
    """Has this process join the pool on the host as soon as torch allocates in it what is worth it, or trains: most processes
    that import torch do neither, such as torchrun's own and what prepares data. Once, when torch has been imported."""
    global _kin
    path = library_path()
    if path is None or not check_torch() or open_library(path) is None:
        return
    part = open_host_part(path)
    if part is not None and install_on_host(part):
        _kin = _Kin(part)
