"""Children that a training process forks: what trains in the pool is told so at once, what does not is let alone."""

import json
import os
import sys
import textwrap

from launching import run

HEAD = """
    import json, os, sys, torch, sluice
    from forking import in_forked_child as in_child
    from torch import nn

    def trained(step, model, x):
        return float(step(lambda x: model(x).mean(), x))

    def made():
        model = nn.Linear(16, 4)
        return model, sluice.Step(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=4)

    x = torch.randn(16, 16)
"""


def said_by(sluice, checkout, monkeypatch, code):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(checkout / "runtime" / "python"), str(checkout / "tests"))))
    done = run(sluice, [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(code)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_step_of_the_parent_is_refused_in_a_child_at_once(sluice, checkout, monkeypatch):
    said, _ = said_by(sluice, checkout, monkeypatch, """
        model, step = made()
        calls = []

        def counted(x):
            calls.append(len(x))
            return model(x).mean()

        def child():
            try:
                step(counted, x)
            except sluice.SluiceError as why:
                return f"{why} after {len(calls)} calls"

        before = in_child(child)
        parent = trained(step, model, x)
        after = in_child(child)
        print(json.dumps([before, after, parent, trained(step, model, x), step.shared, step.stats()["discards"]]))
    """)
    before, after, *losses, shared, discards = said
    assert "a forked child of a training process cannot train in the pool" in before and before == after
    assert "spawn" in before and before.endswith("after 0 calls")
    assert losses[1] < losses[0] and shared and discards == 0


def test_a_child_that_makes_its_own_step_is_told_why_and_trains_without_sharing(sluice, checkout, monkeypatch):
    said, errors = said_by(sluice, checkout, monkeypatch, """
        model, step = made()
        trained(step, model, x)

        def child():
            model, step = made()
            first = trained(step, model, x)
            return f"{step.shared} {trained(step, model, x) < first}"

        print(json.dumps([in_child(child), trained(step, model, x), step.shared]))
    """)
    assert said[0] == "False True" and said[2]
    assert "trains without sharing: a forked child of a training process cannot train in the pool" in errors
    assert "it is the" not in errors


def test_a_child_that_is_forked_before_anything_is_shared_is_a_job_of_its_own(sluice, checkout, monkeypatch):
    said, errors = said_by(sluice, checkout, monkeypatch, """
        def child():
            model, step = made()
            trained(step, model, x)
            return str(step.shared)

        print(json.dumps([in_child(child)]))
    """)
    assert said == ["True"] and errors == ""
