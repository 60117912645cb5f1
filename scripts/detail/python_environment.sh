#!/usr/bin/env bash
# Chooses the Python with torch, and makes .venv where the caller's python3 will not do. To be
# sourced by setup.sh.
#
# A .venv made here holds a marker that says `building` for as long as it may be incomplete, so
# that one whose making was killed is thrown away instead of being trusted. There are two modes:
# `own` has a torch of its own, `layered` borrows the packages of the caller's python3.
set -euo pipefail
: "${root:?}" "${cache:?}"

readonly supported_torch='torch>=2.11,<2.12'
venv=$root/.venv
marker=$venv/made-by-sluice-setup
requirement_files=("$root/scripts/requirements.txt")
if [[ -e $root/examples/requirements.txt ]]; then
  requirement_files+=("$root/examples/requirements.txt")
fi

# Prints the requirements that interpreter $1 does not satisfy.
lacking() {
  local status=0 check=$root/scripts/detail/check_requirements.py
  "$1" -B "$check" --accept "$supported_torch" "${requirement_files[@]}" || status=$?
  ((status <= 1)) || die 1 "the requirements could not be checked with $1"
}

lacks_torch() { grep -q '^torch[^a-z]' <<<"$1"; }

# The python3 that the caller means. Inside the checkout's own activated .venv that is the one
# it was made from.
caller_python() {
  python3 - "$venv" <<'PY'
import os, sys
inside = os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1])
print(sys._base_executable if inside else sys.executable)
PY
}

# An interpreter for which torch has wheels and that can make virtual environments.
base_python() { # the caller's
  local candidate
  for candidate in "$1" /usr/bin/python3; do
    if [[ -x $candidate ]] && "$candidate" -c '
import ensurepip, sys, venv
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die 2 "torch needs Python 3.10 to 3.14 with the venv module, which $1 is not"
}

install_with_pip() { # interpreter, what it lacks
  local python=$1 log=$cache/pip.log details=$cache/pip-details.log file have requirements=()
  local options=(--no-input --no-compile --disable-pip-version-check --progress-bar off)
  rm -f "$details"
  options+=(--log "$details")  # the only place where every failed connection is told
  if [[ -n ${SLUICE_WHEELS:-} ]]; then
    [[ -d $SLUICE_WHEELS ]] || die 2 "SLUICE_WHEELS names '$SLUICE_WHEELS', which is no folder"
    options+=(--no-index --find-links "$SLUICE_WHEELS")
  fi
  # pip's cache makes a second try quick, but keeps the archives (3 GB) beside what they hold.
  if (($(df --output=avail -k "$root" | tail -n 1) < 16 * 1024 * 1024)); then
    options+=(--no-cache-dir)
  fi
  for file in "${requirement_files[@]}"; do requirements+=(--requirement "$file"); done
  have=$("$python" -c 'from importlib.metadata import version as v; print(v("torch"))' \
    2>/dev/null) || have=''
  if [[ -n $have ]]; then
    # The torch that is here stays: the pin is for a first installation, and no package of the
    # examples may bring another one.
    sed '/^torch[^a-z]/d' "${requirement_files[0]}" >"$cache/requirements-without-torch.txt"
    requirements[1]=$cache/requirements-without-torch.txt
    echo "torch==${have%%+*}" >"$cache/constraints.txt"
    options+=(--constraint "$cache/constraints.txt")
  fi
  note "installing from ${SLUICE_WHEELS:-the package index}: ${2//$'\n'/, }"
  "$python" -m pip install "${options[@]}" "${requirements[@]}" >"$log" 2>&1 ||
    explain_and_die 'installing Python packages' "$log" "$details"
  "$python" -c 'import torch
print(f"    torch {torch.__version__} imports; CUDA device: {torch.cuda.is_available()}")' ||
    die 1 "torch was installed but cannot be imported; the log of its installation is $log"
}

# Removes a .venv of ours that cannot be completed.
discard_unusable_venv() { # mode
  local state
  state=$(<"$marker")
  if [[ $state != complete-* ]]; then
    note '.venv was left half made; making it anew'
  elif ! "$chosen" -c '' 2>/dev/null; then
    note 'the Python that .venv was made from is gone; making it anew'
  elif [[ $state != "complete-$1" ]] && lacks_torch "$(lacking "$chosen")"; then
    note '.venv borrows a torch that is gone; making it anew'
  else
    return 0
  fi
  rm -rf "$venv"
}

make_venv() { # mode, the caller's python3
  local base=$2 own_packages
  if [[ $1 == own ]]; then base=$(base_python "$2"); fi
  mkdir "$venv"
  echo building >"$marker"
  "$base" -m venv "$venv" >"$cache/venv.log" 2>&1 ||
    explain_and_die "making .venv with $base" "$cache/venv.log"
  if [[ $1 == layered ]]; then
    # --system-site-packages would show the packages of the interpreter that the caller's own
    # environment was made from, not those of that environment.
    own_packages=$("$chosen" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$2" -c 'import os, sys, sysconfig
standard = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
for path in sys.path:
    with_packages = os.path.basename(path) in ("site-packages", "dist-packages")
    if os.path.isdir(path) and (with_packages or not path.startswith(standard)):
        print(os.path.abspath(path))' >"$own_packages/caller.pth"
  fi
}

prepare_venv() { # mode, the caller's python3
  local lines
  chosen=$venv/bin/python3
  if [[ -e $venv && ! -e $marker ]]; then
    lines='a Python'
    if [[ -x $chosen ]]; then lines=$(lacking "$chosen"); fi
    [[ -z $lines ]] || die 1 "$venv was not made by this script and lacks ${lines//$'\n'/, }." \
      'Install that there, or move it away'
    return
  fi
  if [[ -e $venv ]]; then discard_unusable_venv "$1"; fi
  if [[ ! -e $venv ]]; then make_venv "$@"; fi
  lines=$(lacking "$chosen")
  if [[ -n $lines ]]; then
    echo building >"$marker"
    install_with_pip "$chosen" "$lines"
  fi
  echo "complete-$1" >"$marker"
}

# Sets chosen, and records it in .cache/python.
choose_python() {
  local caller lines
  caller=$(caller_python)
  lines=$(lacking "$caller")
  if [[ -z $lines ]]; then
    chosen=$caller
  elif lacks_torch "$lines"; then
    prepare_venv own "$caller"
  else
    prepare_venv layered "$caller"
  fi
  if [[ ! -e $cache/python || $(<"$cache/python") != "$chosen" ]]; then
    echo "$chosen" >"$cache/python.new"
    mv "$cache/python.new" "$cache/python"
  fi
}
