"""The job and the broker behind a benchmark's pool."""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence


def clear_up_on_sigterm() -> None:
    """A benchmark that is told to end runs its `finally` clauses: the job it started would train on for ever."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def end_broker(folder: str | os.PathLike) -> None:
    """Ends the broker and waits until it has gone, so that the next pool finds the memory free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conversation:
        conversation.connect(f"{folder}/broker.sock")
        pid, _, _ = struct.unpack("3i", conversation.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [])
        os.close(process)


@contextlib.contextmanager
def job_in_pool(sluice: os.PathLike, backend: str, folder: str | os.PathLike, options: Sequence, command: Sequence,
                environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A job under `sluice run` with those options, its runtime files in `folder`. Job and broker have ended when it is left."""
    with jobs_in_pools(sluice, backend, folder, [(options, command)], environment) as (training,):
        yield training


@contextlib.contextmanager
def jobs_in_pools(sluice: os.PathLike, backend: str, folder: str | os.PathLike, jobs: Sequence[tuple[Sequence, Sequence]],
                  environment: dict[str, str]) -> Iterator[list[subprocess.Popen]]:
    """The same with several at once, each given as options and command, that find each other's broker."""
    training = [subprocess.Popen([sluice, "run", "--backend", backend, "--runtime-dir", folder, *options, "--", *command],
                                 env=environment) for options, command in jobs]
    try:
        yield training
    finally:
        for job in training:
            job.terminate()
        for job in training:
            job.wait()
        end_broker(folder)
