"""What tests of steps share: where their processes come from (to import torch takes each of them longer than most of what it does
then), and how PyTorch stands."""

import multiprocessing.forkserver
import sys

import pytest

PRELOADED = ["pytest", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "lightning.pytorch", "transformers.trainer"]


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Lives longer than a test. What is not installed is not preloaded."""
    multiprocessing.forkserver.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def no_loader_is_left():
    """accelerate knows of each loader that a test has not read to its end, and has later tests commit when that one is over."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.GradientState._reset_state()


@pytest.fixture(scope="module")
def one_thread():
    """Tensors are so small that threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_is_compiled():
    """Where something is, modules are looked at in the rehearsal alone."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
