"""Sluice: train with all the memory of a machine or GPU, and give it up within a millisecond when a request arrives.

Under ``sluice run`` this package puts the training process into the shared pool; anywhere else it is plain PyTorch::

    import sluice

    step = sluice.Step(model, optimizer, micro_batch=64)
    for x, y in loader:
        loss = step(lambda x, y: F.cross_entropy(model(x), y), x, y)
"""

from sluice import _sharing
from sluice._version import __version__
from sluice.balance import BalancedBatchSampler
from sluice.errors import OutOfMemory, SluiceError, Survivors
from sluice.step import MicroBatch, Step

__all__ = ["BalancedBatchSampler", "MicroBatch", "OutOfMemory", "SluiceError", "Step", "Survivors", "__version__"]

_sharing.check_torch()  # in one line, and now: not in the middle of what a job does first
