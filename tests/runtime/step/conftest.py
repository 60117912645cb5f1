"""Where processes of tests come from: to import torch takes each of them longer than most of what it does then."""

import multiprocessing.forkserver

import pytest

PRELOADED = ["pytest", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "lightning.pytorch", "transformers.trainer"]


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Lives longer than a test. What is not installed is not preloaded."""
    multiprocessing.forkserver.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()
