#!/usr/bin/env bash
# Runs one benchmark with the Python that has torch, and prints its table. The record goes to
# benchmarks/results/NAME-SLUG.json.
#
#   ./benchmarks/run.sh NAME [options]     for example: ./benchmarks/run.sh overhead --help
#
# Needs what scripts/setup.sh and scripts/build.sh make. In a copy of a tree, whose git history is
# missing or behind, SLUICE_COMMIT names the full hash of the commit that is measured.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
name=${1:-}
program=$here/$name.py

if [[ ! $name =~ ^[a-z][a-z0-9_]*$ || $name == records || ! -e $program ]]; then
  echo 'run.sh: name a benchmark:' >&2
  grep -lE '^ +write\(' "$here"/*.py | sed 's|.*/|  |; s|\.py$||; /^  records$/d' >&2
  exit 2
fi
if [[ ! -e $root/.cache/python ]]; then
  echo 'run.sh: this checkout is not set up; run ./scripts/setup.sh first' >&2
  exit 2
fi
shift
exec "$(<"$root/.cache/python")" "$program" "$@"
