#!/usr/bin/env bash
# Prints the folder that has prometheus and promtool: that of the system if they are there, else .cache/prometheus, into which
# Debian's package is unpacked. It is not installed: that would start a service on the developer's machine.
#
# Exit status: 0 there; 1 not to be had, with the reason on standard error.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$root/.cache/prometheus

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
  dirname "$(command -v prometheus)"
  exit 0
fi
if [[ ! -x $home/usr/bin/prometheus ]]; then
  mkdir -p "$root/.cache"
  new=$(mktemp -d "$root/.cache/prometheus-XXXXXX")
  trap 'rm -rf "$new"' EXIT
  cd "$new"
  apt-get download -q -o Acquire::Retries=2 prometheus >&2
  dpkg-deb --extract prometheus_*.deb .
  rm prometheus_*.deb
  mv -T "$new" "$home" 2>/dev/null || [[ -x $home/usr/bin/prometheus ]]  # somebody else was quicker
fi
echo "$home/usr/bin"
