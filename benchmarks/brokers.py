"""The broker behind a benchmark's pool."""

import os
import select
import signal
import socket
import struct
import sys


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
