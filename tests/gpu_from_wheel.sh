#!/usr/bin/env bash
# Runs the GPU tests, or a benchmark, with the programs, libraries and the Python package of a wheel instead of the build's.
#
#   ./tests/gpu_from_wheel.sh WHEEL                     tests/gpu
#   ./tests/gpu_from_wheel.sh WHEEL COMMAND [ARGUMENT…]  another command, in a copy of tests and benchmarks
#
# The programs of tests and benchmarks are those of build/release. What is run lies in build/wheel/checkout.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 1 || ! -f $1 || ! -d build/release/bin ]]; then
  echo 'gpu_from_wheel: name a wheel, and build first: ./scripts/build.sh' >&2
  exit 2
fi
wheel=$(realpath "$1")
shift
python=python3
if [[ -e .cache/python ]]; then python=$(<.cache/python); fi
release=$PWD/build/release
installed=$PWD/build/wheel/packages
checkout=$PWD/build/wheel/checkout
rm -rf build/wheel
mkdir -p "$checkout/build/release/lib" "$checkout/runtime/python"

"$python" -m pip install --quiet --no-deps --no-index --target "$installed" "$wheel"
cp -r tests benchmarks examples scripts pyproject.toml "$checkout/"
cp -r .cache "$checkout/.cache"
ln -s "$installed/sluice" "$checkout/runtime/python/sluice"
cp -rs "$release/bin" "$checkout/build/release/bin"
cp -rs "$release/lib/." "$checkout/build/release/lib/"
for part in bin/sluice lib/libsluice_runtime.so lib/libsluice_gate.so lib/libsluice_nccl.so lib/_torch; do
  rm -rf "$checkout/build/release/${part:?}"
  ln -s "$installed/sluice/$part" "$checkout/build/release/$part"
done

export PYTHONPATH=$installed${PYTHONPATH:+:$PYTHONPATH}  # as `sluice run` of a wheel leaves it to the environment
cd "$checkout"
if [[ $# -eq 0 ]]; then
  at_once=$("$python" -c 'import sys; sys.path.insert(0, "tests"); import run_stages; print(run_stages.tests_at_once_on_gpu())')
  set -- "$python" -m pytest -p no:cacheprovider --numprocesses="$at_once" --dist=loadgroup --durations=0 tests/gpu
fi
exec "$@"
