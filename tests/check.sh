#!/usr/bin/env bash
# The first verdict on a change; `./tests/check.sh --help` tells how.
set -euo pipefail

exec python3 "$(dirname "${BASH_SOURCE[0]}")/check.py" "$@"
