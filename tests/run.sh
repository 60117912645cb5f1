#!/usr/bin/env bash
# Sets up, builds and runs everything that this machine can run: unit tests, the same under
# sanitizers, lint, system tests, and the GPU tests where there is a GPU.
#
#   ./tests/run.sh              everything
#   ./tests/run.sh --fast       no sanitizers, no lint
#   ./tests/run.sh --long       as --fast, with searches and loops at length: hours
#   ./tests/run.sh -k PATTERN   only the unit and pytest cases whose names match
#   ./tests/run.sh --prebuilt   with build/release as it is, and no system packages: for a tree that
#                               was built elsewhere; no sanitizers, no lint
#
# It goes on after a failure. The last line is `N passed, N failed`; the exit status is 0 only if
# nothing failed. Logs and JUnit files lie in build/test-results.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

setup=(./scripts/setup.sh --system-only --lint)
for argument in "$@"; do
  case $argument in
    --fast | --long) setup=(./scripts/setup.sh --system-only) ;;
    --prebuilt) setup=(true) ;;
    -h | --help)
      sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
  esac
done

# Python's packages are a stage, beside which what needs none of them is built.
setup_status=0
"${setup[@]}" || setup_status=$?
if ! command -v python3 >/dev/null; then
  echo '0 passed, 1 failed'
  exit 1
fi
exec python3 tests/run_stages.py --setup-status "$setup_status" "$@"
