#!/usr/bin/env bash
# Makes this checkout ready to build and run: system packages, and a Python that has torch.
#
#   ./scripts/setup.sh                   everything that building, testing and the examples need
#   ./scripts/setup.sh --lint            also clang-tidy, clang-format, shellcheck, and clang for AddressSanitizer
#   ./scripts/setup.sh --tests           also the Python packages that only tests need, and vLLM (.cache/vllm)
#   ./scripts/setup.sh --python-only     no system packages: for a tree that was built elsewhere
#   ./scripts/setup.sh --system-only     only system packages
#   ./scripts/setup.sh --list-packages   print the system packages for this system, change nothing
#
# Outside the checkout it changes nothing but system packages, and those only where something is
# missing. A python3 whose torch is in the supported range is used as it is; else torch goes into
# .venv. The interpreter chosen is written to .cache/python, which build.sh reads. It may be run
# again at any time, also after it was killed.
#
# Environment:
#   SLUICE_WHEELS      folder of wheels: Python packages come from there alone, without network
#   SLUICE_OS_RELEASE  read instead of /etc/os-release
#
# Exit status: 0 ready; 2 wrong usage or an unsupported system; 3 no network; 4 the network was too
# slow; 5 not allowed to install system packages; 1 anything else.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=$root/.cache
# shellcheck source=scripts/detail/messages.sh
source "$root/scripts/detail/messages.sh"
# shellcheck source=scripts/detail/system_packages.sh
source "$root/scripts/detail/system_packages.sh"
# shellcheck source=scripts/detail/python_environment.sh
source "$root/scripts/detail/python_environment.sh"
# shellcheck source=scripts/detail/vllm.sh
source "$root/scripts/detail/vllm.sh"

lint=no python_only=no system_only=no list_packages=no tests=no
for argument in "$@"; do
  case $argument in
    --lint) lint=yes ;;
    --python-only) python_only=yes ;;
    --system-only) system_only=yes ;;
    --tests) tests=yes ;;
    --list-packages) list_packages=yes ;;
    -h | --help)
      sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) die 2 "unknown option '$argument'; known: --lint, --tests, --python-only, --system-only, --list-packages, --help" ;;
  esac
done

if [[ $python_only == yes && $system_only == yes ]]; then
  die 2 '--python-only and --system-only together leave nothing to do: name one of them'
fi
if [[ $tests == yes && -e $root/tests/requirements.txt ]]; then
  requirement_files+=("$root/tests/requirements.txt")
fi
if [[ $lint == yes && -e $root/scripts/lint-requirements.txt ]]; then
  requirement_files+=("$root/scripts/lint-requirements.txt")
fi
if [[ $list_packages == yes ]]; then
  list_packages "$lint"
  exit 0
fi

started=$(microseconds)
mkdir -p "$cache"
# Held by pip too, if this script is killed: the next one waits until nobody writes into .venv.
exec 9>"$cache/setup.lock"
flock -n 9 || {
  echo '==> Another setup of this checkout is running; waiting for it'
  flock 9
}

if [[ $python_only == no ]]; then
  begin 'System packages'
  find_missing_packages "$lint"
  if [[ ${#missing[@]} -eq 0 ]]; then
    finish 'all present'
  else
    install_packages "$lint"
    finish "$install_outcome"
  fi
fi

if [[ $system_only == yes ]]; then exit 0; fi
begin 'Python with torch'
has_command python3 || die 2 'python3 is not here: run this without --python-only, or install it'
choose_python
if [[ $tests == yes ]]; then install_vllm "$chosen"; fi
finish "using $chosen"
printf '==> Ready (%s)\n' "$(elapsed "$started")"
