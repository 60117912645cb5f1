#!/usr/bin/env bash
# Puts vLLM for the host into .cache/vllm, for the test that runs it. To be sourced by setup.sh.
#
# Its package asks for a torch that no index has under that name, so it comes without what it asks for, and lies apart: nothing
# else is to find it.
set -euo pipefail
: "${root:?}" "${cache:?}"

vllm_requirements=$root/tests/vllm-requirements.txt
readonly vllm_torch=2.11

install_vllm() { # interpreter
  local python=$1 into=$cache/vllm log=$cache/vllm.log torch stamp
  local options=(--no-input --no-compile --no-deps --disable-pip-version-check --progress-bar off)
  [[ -e $vllm_requirements ]] || return 0
  torch=$("$python" -c 'from importlib.metadata import version as v; print(v("torch"))')
  if [[ $torch != "$vllm_torch".* || $(uname -m) != x86_64 ]]; then
    note "no vLLM: that is for torch $vllm_torch on x86_64; its test is skipped"
    return 0
  fi
  stamp=$("$python" -c 'import hashlib, sys
print(*sys.version_info[:2], hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$vllm_requirements")
  if [[ -e $into/made-by-sluice-setup && $(<"$into/made-by-sluice-setup") == "$stamp" ]]; then
    return 0
  fi
  if [[ -n ${SLUICE_WHEELS:-} ]]; then
    options+=(--no-index --find-links "$SLUICE_WHEELS")
  fi
  rm -rf "$into" "$into.new"
  note "installing vLLM for its test from ${SLUICE_WHEELS:-the package index}"
  if ! "$python" -m pip install "${options[@]}" --target "$into.new" --requirement "$vllm_requirements" >"$log" 2>&1; then
    rm -rf "$into.new"
    if [[ -n ${SLUICE_WHEELS:-} ]]; then
      note "it is not among those wheels ($log); its test is skipped"
      return 0
    fi
    explain_and_die 'installing vLLM' "$log"
  fi
  echo "$stamp" >"$into.new/made-by-sluice-setup"
  mv "$into.new" "$into"
}
