#!/usr/bin/env bash
# Fuzzes what reads the bytes of strangers, with libFuzzer under AddressSanitizer and UBSan: the long form of the tests fuzz_*.
#
#   ./tests/fuzz.sh [TARGET [RUNS]]     default: http_target, 10000000; others: grpc_target, files_target
#
# What it finds it prints, and leaves in build/fuzz/found; what it has learned is in build/fuzz/corpus, and the next run goes on from
# there. Ends with libFuzzer's figures: executions, coverage, memory.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${1:-http_target} runs=${2:-10000000}

./scripts/build.sh fuzz "$target"
mkdir -p "build/fuzz/corpus/$target" build/fuzz/found
# A small quarantine, so that memory shows what grows; and no fake stacks, for speed.
export ASAN_OPTIONS=${ASAN_OPTIONS:-quarantine_size_mb=16:malloc_context_size=3:strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
exec "build/fuzz/bin/$target" -runs="$runs" -max_len=2048 -entropic=0 -reduce_inputs=0 -rss_limit_mb=1024 -print_final_stats=1 \
  -dict=tests/runtime/server_fuzz/http.dict -artifact_prefix=build/fuzz/found/ "build/fuzz/corpus/$target"
