"""What a training job on the host hears when memory runs short.

    sluice run … -- python memory_job.py plain | step | arena

It prints the message of what is raised.
"""

import sys

import torch

import sluice

TOO_MUCH = 1 << 40  # bytes; more than any pool of a test


def plain() -> None:
    """A tensor of the job's own, outside of any step."""
    weight = torch.nn.Parameter(torch.zeros(8))
    sluice.Step(torch.nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.1))
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def step() -> None:
    """Memory that the optimizer wants, from inside a step."""
    weight = torch.nn.Parameter(torch.zeros(8))

    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            self.state["much"] = torch.empty(TOO_MUCH, dtype=torch.uint8)

    one = sluice.Step(torch.nn.ParameterList([weight]), Greedy([weight], lr=0.1), micro_batch=4)
    one(lambda x: (x * weight).mean(), torch.ones(4, 8))


def arena() -> None:
    """A sample that can never fit."""
    weight = torch.nn.Parameter(torch.zeros(8))
    one = sluice.Step(torch.nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.1), micro_batch=4)
    one(lambda x: (x[:, :1] * weight[0] * torch.ones(1 << 28)).mean(), torch.ones(4, 8))


if __name__ == "__main__":
    try:
        {"plain": plain, "step": step, "arena": arena}[sys.argv[1]]()
    except (torch.OutOfMemoryError, sluice.OutOfMemory) as why:
        print(type(why).__name__, why)
