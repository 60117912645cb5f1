"""Which Python has torch, and what else setup.sh installs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def chosen_python() -> str:
    """The interpreter with torch that setup.sh recorded."""
    recorded = ROOT / ".cache" / "python"
    return recorded.read_text().strip() if recorded.exists() else sys.executable
