#!/usr/bin/env bash
# Which system packages are missing, and their installation. To be sourced by setup.sh.
#
# What is needed is looked for itself, not its package: a CMake from elsewhere is as good.
set -euo pipefail
: "${cache:?}"

readonly oldest_cmake=3.25 oldest_gxx=12 oldest_boost=108100

# Sets boost_package, or system_problem where the packages' names are not known.
select_system() {
  local file=${SLUICE_OS_RELEASE:-/etc/os-release} id='' version=''
  boost_package=libboost-dev system_problem=''
  if [[ -r $file ]]; then
    id=$(sed -n 's/^ID=//p' "$file" | tr -d '"')
    version=$(sed -n 's/^VERSION_ID=//p' "$file" | tr -d '"')
  fi
  case $id-$version in
    # Its default Boost is 1.74; the newer one that it also carries has its version in its name.
    debian-12) boost_package=libboost1.81-dev ;;
    debian-1[3-9] | ubuntu-2[4-9].*) ;;
    *)
      system_problem='the packages of Debian 12, Ubuntu 24.04 and newer are known here,'
      system_problem+=" not those of ${id:-an unnamed system}${version:+ $version}"
      ;;
  esac
}

number_at_least() { # version, least: both like 3.25.1
  [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]
}

has_command() { command -v "$1" >/dev/null; }

has_cmake() {
  has_command cmake && number_at_least "$(cmake --version | sed -n '1s/[^0-9]*//p')" $oldest_cmake
}

has_gxx() { has_command g++ && number_at_least "$(g++ -dumpfullversion)" $oldest_gxx; }

has_venv() { has_command python3 && python3 -c 'import venv, ensurepip' 2>/dev/null; }

has_header() {
  local folder folders prefixes
  IFS=: read -ra folders <<<"${CPATH:-}:/usr/include:/usr/local/include"
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for folder in "${folders[@]}" "${prefixes[@]/%//include}"; do
    if [[ -n $folder && -e $folder/$1 ]]; then
      found_header=$folder/$1
      return 0
    fi
  done
  return 1
}

# Its folder is on root's path alone.
has_ip() { has_command ip || [[ -x /usr/sbin/ip || -x /sbin/ip ]]; }

has_boost() {
  local version
  has_header boost/beast.hpp && has_header boost/version.hpp || return 1
  version=$(sed -n 's/^#define BOOST_VERSION \([0-9]*\).*/\1/p' "$found_header")
  ((${version:-0} >= oldest_boost))
}

has_address_sanitizer() {
  has_command clang++-14 && [[ -e $(clang++-14 -print-resource-dir)/lib/linux/libclang_rt.asan-x86_64.so ]]
}

# Calls `$1 package check…` for every package; with lint tools if $2 is yes.
for_each_package() {
  "$1" g++ has_gxx
  "$1" cmake has_cmake
  "$1" ninja-build has_command ninja
  "$1" ccache has_command ccache
  "$1" git has_command git
  "$1" python3 has_command python3
  "$1" python3-venv has_venv
  "$1" "$boost_package" has_boost
  "$1" libyaml-cpp-dev has_header yaml-cpp/yaml.h
  "$1" nlohmann-json3-dev has_header nlohmann/json.hpp
  "$1" libspdlog-dev has_header spdlog/spdlog.h
  "$1" libfmt-dev has_header fmt/core.h
  "$1" prometheus-cpp-dev has_header prometheus/text_serializer.h
  "$1" libprotobuf-dev has_header google/protobuf/text_format.h
  "$1" protobuf-compiler has_command protoc
  "$1" libgrpc++-dev has_header grpcpp/grpcpp.h
  "$1" zlib1g-dev has_header zlib.h
  "$1" libssl-dev has_header openssl/ssl.h
  "$1" libcli11-dev has_header CLI/CLI.hpp
  "$1" libgtest-dev has_header gtest/gtest.h
  "$1" libgmock-dev has_header gmock/gmock.h
  "$1" spin has_command spin
  "$1" openssl has_command openssl
  "$1" curl has_command curl
  "$1" iproute2 has_ip
  "$1" libbenchmark-dev has_header benchmark/benchmark.h
  if [[ $2 == yes ]]; then
    # By version: other releases format differently.
    "$1" clang-format-14 has_command clang-format-14
    "$1" shellcheck has_command shellcheck
    # For AddressSanitizer it takes half the time of g++; its ThreadSanitizer does not bear libraries that are preloaded.
    "$1" clang-14 has_command clang++-14
    "$1" libclang-rt-14-dev has_address_sanitizer
  fi
}

want() { # package, check…
  "${@:2}" || missing+=("$1")
}

find_missing_packages() { # with lint tools?
  missing=()
  select_system
  for_each_package want "$1"
}

# Without these everything works, only slower.
is_optional() { [[ $1 == ccache ]]; }

all_missing_are_optional() {
  local package
  for package in "${missing[@]}"; do
    is_optional "$package" || return 1
  done
}

print_name() { echo "$1"; }

list_packages() { # with lint tools?
  select_system
  [[ -z $system_problem ]] || die 2 "$system_problem"
  for_each_package print_name "$1"
}

# Sets install_outcome to what was done.
# shellcheck disable=SC2034  # setup.sh prints it
install_packages() { # with lint tools?
  local count=${#missing[@]}
  install_outcome="$count installed"
  if all_missing_are_optional; then
    if (install_with_apt "$1") 2>"$cache/optional.log"; then
      find_missing_packages "$1"
    else
      install_outcome="all present but ${missing[*]}, without which building again is slower"
    fi
  else
    install_with_apt "$1"
  fi
}

install_with_apt() { # with lint tools?
  local log=$cache/apt.log as_root=() options
  [[ -z $system_problem ]] || die 2 "$system_problem. Install yourself: ${missing[*]}"
  has_command apt-get || die 2 "apt-get is not here. Install yourself: ${missing[*]}"
  if ((EUID != 0)); then
    if has_command sudo && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then
      as_root=(sudo)
    else
      die 5 "installing system packages needs root or sudo. Run as root:" \
        "apt-get install ${missing[*]}"
    fi
  fi
  note "installing: ${missing[*]}"
  options=(-q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 -o Acquire::http::Timeout=60)
  # A failed update alone is no failure: one broken source must not stop packages from others.
  "${as_root[@]}" apt-get "${options[@]}" update >"$log" 2>&1 || true
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get "${options[@]}" install --no-install-recommends "${missing[@]}" >>"$log" 2>&1 ||
    explain_and_die 'installing system packages' "$log"
  hash -r
  find_missing_packages "$1"
  [[ ${#missing[@]} -eq 0 ]] ||
    die 1 "installed, but still not found or too old: ${missing[*]}" \
      "(needed: g++ $oldest_gxx, CMake $oldest_cmake, Boost 1.81)"
}
