#!/usr/bin/env bash
# A fixed number of inputs, drawn with a fixed seed from those that the target makes. For CTest.
#
#   run_shortly.sh TARGET [OPTION…]
set -euo pipefail

corpus=$(mktemp -d)
trap 'rm -rf "$corpus"' EXIT
dictionary=$(dirname "${BASH_SOURCE[0]}")/http.dict
"$1" -seed=20240229 -runs="${SLUICE_TEST_FUZZED:-4000}" -max_len=8192 -dict="$dictionary" -artifact_prefix="$corpus/" \
  -print_final_stats=1 "${@:2}" "$corpus"
