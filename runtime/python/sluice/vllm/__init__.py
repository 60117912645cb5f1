"""vLLM's KV cache out of the pool, chunk by chunk (docs/llm.md).

vLLM calls `register` in each of its processes, since the package is one of its general plugins. It does nothing unless the environment
says ``SLUICE_VLLM_KV=pool``.
"""

from __future__ import annotations

import os

_registered = False


def register() -> None:
    """Has engines of this process take their KV cache from the pool.

    Raises:
        SluiceError: It was asked for, and this vLLM is not one whose parts are known.
    """
    global _registered
    wanted = os.environ.get("SLUICE_VLLM_KV", "own")
    if wanted not in ("own", "pool"):
        from sluice.errors import SluiceError

        raise SluiceError(f"SLUICE_VLLM_KV is {wanted!r}, must be pool, or own (the default), with which vLLM is left alone")
    if wanted == "own" or _registered:
        return
    from sluice.vllm import _checks

    _checks.check_vllm()
    from sluice.vllm import _patches

    _patches.install()
    _registered = True
