"""What can go wrong in a shared training process."""


class SluiceError(RuntimeError):
    """Base of the package's own errors."""


class OutOfMemory(SluiceError):
    """Not even the smallest permitted micro-batch fits into the pool, and nothing else holds memory that could return."""


class Survivors(SluiceError):
    """Tensors of a discarded micro-batch are still referenced; their memory is gone, so they must not be used.

    The loss function may run more than once. What it keeps beyond its own run (a list of outputs, an attribute of the
    model) must be detached and copied outside of it.
    """
