"""Adapters that let other packages' training loops share; each module needs its package, and none is imported unasked.

``sluice.integrations.transformers.share(trainer)``, ``sluice.integrations.lightning.SluiceStrategy()``, and
``sluice.integrations.accelerate.share(accelerator, model, optimizer)``.
"""
