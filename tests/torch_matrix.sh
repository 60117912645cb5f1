#!/usr/bin/env bash
# Builds and tests Sluice with several versions of PyTorch and of Python, and prints a table; `--help` tells how.
set -euo pipefail

exec python3 "$(dirname "${BASH_SOURCE[0]}")/torch_matrix.py" "$@"
