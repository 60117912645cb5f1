"""The commands `sluice` and `sluice-server` of an installed package: the programs lie in it, and take this process's place.

Beside the package, not in it: to import that imports torch.
"""

import importlib.util
import os
import sys


def _become(name: str) -> None:
    package = importlib.util.find_spec("sluice")
    program = os.path.join(package.submodule_search_locations[0], "bin", name) if package else ""
    if not os.access(program, os.X_OK):
        sys.exit(f"{name}: {sys.executable} has no package sluice with its programs; install it there: pip install sluice")
    os.execv(program, [name, *sys.argv[1:]])


def sluice() -> None:
    _become("sluice")


def server() -> None:
    _become("sluice-server")
