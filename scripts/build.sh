#!/usr/bin/env bash
# Configures and builds one preset of CMakePresets.json into build/<preset>.
#
#   ./scripts/build.sh [preset] [target…]      default: release, everything
#
# Needs what scripts/setup.sh sets up. SLUICE_JOBS sets how many compilers run at once.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
preset=${1:-release}
targets=("${@:2}")

python=python3 # does for what is built without torch
if [[ -e .cache/python ]]; then
  python=$(<.cache/python)
elif [[ $preset != asan && $preset != fuzz && $preset != tsan ]]; then
  echo 'build: this checkout is not set up; run ./scripts/setup.sh first' >&2
  exit 2
fi
# A file that includes torch takes about 2.5 GB to compile.
by_memory=$(($(awk '/^MemAvailable/ {print $2}' /proc/meminfo) / 2500000))
jobs=${SLUICE_JOBS:-$((by_memory < 1 ? 1 : by_memory < $(nproc) ? by_memory : $(nproc)))}

SECONDS=0
cmake --preset "$preset" -DSLUICE_PYTHON="$(command -v "$python")" --log-level=NOTICE
# Keeps going, so that one run names every file that does not compile.
cmake --build --preset "$preset" -j "$jobs" ${targets[@]:+--target "${targets[@]}"} -- -k 0
printf '==> Built %s in %d s\n' "$preset" "$SECONDS"
