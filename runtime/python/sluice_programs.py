"""The commands `sluice` and `sluice-server` of an installed package: the programs lie in it, and take this process's place.

Beside the package, not in it: to import that imports torch. What computes for a server is for the torch of this interpreter.
"""

import importlib.metadata
import importlib.util
import os
import sys

INSTALL = "pip install sluice"


def _folder_of(package: str) -> str:
    """Without importing it; empty if this interpreter has none."""
    spec = importlib.util.find_spec(package)
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""


def _become(name: str, *inside: str) -> None:
    program = os.path.join(_folder_of("sluice"), *inside, name)
    if not os.access(program, os.X_OK):
        sys.exit(f"{name}: {sys.executable} has no package sluice with its programs; install it there: {INSTALL}")
    os.execv(program, [name, *sys.argv[1:]])


def _name_torch() -> str:
    """Tells the programs which torch they find here, and where it lies if not beside the package. Returns its minor version."""
    torch = _folder_of("torch")
    if not torch:
        return ""
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    os.environ.setdefault("SLUICE_TORCH", minor)
    if os.path.dirname(torch) != os.path.dirname(_folder_of("sluice")):
        folders = [os.path.join(torch, "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    return minor


def sluice() -> None:
    if sys.argv[1:2] == ["serve"]:
        _name_torch()
    _become("sluice", "bin")


def server() -> None:
    minor = _name_torch()
    if not minor:
        sys.exit(f"sluice-server: {sys.executable} has no torch; install it there: pip install torch")
    _become("sluice-server", "bin")
