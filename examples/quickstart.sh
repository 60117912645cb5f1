#!/usr/bin/env bash
# Sets up, builds, and shows a training job and an inference server that share one memory pool.
#
#   ./examples/quickstart.sh              uses a GPU if there is one
#   ./examples/quickstart.sh --help       the demonstration's options
#   ./examples/quickstart.sh --prebuilt   with build/release as it is, and no system packages: for a
#                                         tree that was built elsewhere
#
# Exit status: 0 only if everything that it shows off happened.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

setup=(./scripts/setup.sh) build=yes options=()
for argument in "$@"; do
  case $argument in
    --prebuilt) setup+=(--python-only) build=no ;;
    *) options+=("$argument") ;;
  esac
done

"${setup[@]}"
if [[ $build == yes ]]; then
  ./scripts/build.sh release sluice sluice-server sluice-executor sluice_gate sluice_runtime sluice_torch_host
fi
python=$(<.cache/python)
"$python" examples/prepare_models.py
exec "$python" examples/quickstart.py ${options[@]:+"${options[@]}"}
