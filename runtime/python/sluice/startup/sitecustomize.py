"""Put first on PYTHONPATH by `sluice run` where the pool is on the host: a process that imports torch comes to share.

    site ─► this file ─► the sitecustomize that there is without it ─► the program ─► import torch ─► _sharing.share_later()

What imports no torch pays for a comparison of names in each import. Any Python may find this, so no version's own syntax is used,
and nothing is imported that is not there by then.
"""

import os
import sys


def _share():
    """Loads the module by its path: the package around it would import much more of torch, and may belong to another interpreter."""
    import importlib.util

    package = os.path.dirname(os.path.dirname(os.path.abspath(_FILE)))
    spec = importlib.util.spec_from_file_location("sluice._sharing", os.path.join(package, "_sharing.py"))
    sharing = sys.modules.get(spec.name)
    if sharing is None:
        sharing = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = sharing  # which `import sluice` then finds
        spec.loader.exec_module(sharing)
    sharing.share_later()


def _share_or_say_why_not():
    try:
        _share()
    except Exception as why:  # the program is not to end for it, unless it is to share whatever comes
        sys.stderr.write("sluice: this process cannot share: %s: %s\n" % (type(why).__name__, why))
        if os.environ.get("SLUICE_REQUIRE_POOL") == "1":
            sys.exit(125)


class _LoaderOfTorch(object):
    """The loader that torch has anyway, and what follows it."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        _share_or_say_why_not()


class _FinderOfTorch(object):
    """Leaves finding to all others."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _LoaderOfTorch(spec.loader)
                return spec
        return None


_FILE = __file__
_FINDER = _FinderOfTorch()

if sys.version_info >= (3, 10) and os.environ.get("SLUICE_RUN") == "1":
    if "torch" in sys.modules:  # by a .pth file
        _share_or_say_why_not()
    else:
        sys.meta_path.insert(0, _FINDER)

# From here on as if this file had not been found: what it is not there for either, is the same error.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401
