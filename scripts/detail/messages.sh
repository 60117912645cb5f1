#!/usr/bin/env bash
# What setup.sh prints: steps with their times, and failures in words. To be sourced.
set -euo pipefail

microseconds() { echo "${EPOCHREALTIME//[.,]/}"; }

elapsed() { # since the instant $1
  local tenths=$((($(microseconds) - $1 + 50000) / 100000))
  printf '%d.%d s' $((tenths / 10)) $((tenths % 10))
}

begin() {
  step_started=$(microseconds)
  printf '==> %s\n' "$1"
}

note() { printf '    %s\n' "$*"; }

finish() { note "$1 ($(elapsed "$step_started"))"; }

die() { # exit status, words of the message…
  printf 'setup: %s\n' "${*:2}" >&2
  exit "$1"
}

no_network='name resolution|failure resolving|could not resolve|name or service not known'
no_network+='|network is unreachable|no route to host|connection refused|could not connect'
no_network+='|failed to establish a new connection'
not_to_be_had='no matching distribution|unable to locate package|has no installation candidate'

# Turns the log of a failed installer into one sentence and an exit status: a network that is
# absent and one that is too slow ask different things of the reader.
explain_and_die() { # what failed, log, log with more details
  local what=$1 log=${3:-$2}
  tail -n 15 "$2" | sed 's/^/    | /' >&2
  if grep -qiE 'no space left on device' "$log"; then
    die 1 "$what: the disk is full; torch with its CUDA libraries needs about 8 GB to install"
  elif grep -qiE 'certificate.?verif' "$log"; then
    die 1 "$what: the server's certificate is not trusted here; add your proxy's authority to" \
      "the system's, or name it in PIP_CERT"
  elif grep -qiE 'timed out|readtimeout|connecttimeout|timeout was reached' "$log"; then
    die 4 "$what: time-out, the network answered too slowly. Run this again: what was" \
      "downloaded is kept"
  elif grep -qiE "$no_network" "$log"; then
    die 3 "$what: no network. Connect, or name a folder of Python wheels in SLUICE_WHEELS"
  elif grep -qiE "$not_to_be_had" "$log"; then
    die 1 "$what: a package is not to be had for this system or this Python: see above"
  fi
  die 1 "$what failed; the whole log is $log"
}
