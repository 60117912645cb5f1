#!/usr/bin/env bash
# Checks format and findings of the sources; `./scripts/lint.sh --help` tells how.
set -euo pipefail

exec python3 "$(dirname "${BASH_SOURCE[0]}")/lint.py" "$@"
