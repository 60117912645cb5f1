#!/usr/bin/env bash
# Installs a wheel where there is Python and no compiler, on fresh roots of Debian 12 and Ubuntu 24.04, and trains and serves there.
#
#   ./tests/fresh_roots.sh WHEEL [TORCH VERSION]
#
# Needs root, mmdebstrap and the network; makes 6 GB in a folder under build/, one root after the other, and removes them.
# libstdc++6 is torch's need, and prometheus-cpp's, which the wheel brings along; some minimal roots are without it. The Ubuntu root is taken without looking at its signature,
# since Debian has no keys for it: it is a place to try something, no more.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 1 || ! -f $1 ]]; then
  echo "fresh_roots: name a wheel, as \`pip wheel --no-build-isolation --no-deps .\` makes it" >&2
  exit 2
fi
if [[ $(id -u) -ne 0 ]] || ! command -v mmdebstrap >/dev/null; then
  echo 'fresh_roots: needs root and mmdebstrap (apt-get install mmdebstrap)' >&2
  exit 2
fi
wheel=$(realpath "$1")
torch=${2:-}
failed=0
declare -A suite=([debian-12]=bookworm [ubuntu-24.04]=noble)
unsigned=(--aptopt='Acquire::AllowInsecureRepositories "true"' --aptopt='APT::Get::AllowUnauthenticated "true"')

try() { # name, suite
  local root=build/fresh-$1 packages=python3,python3-venv,ca-certificates,libstdc++6 options=()
  if [[ $2 == noble ]]; then options=("${unsigned[@]}" "--components=main,universe"); fi
  rm -rf "$root"
  mkdir -p build
  mmdebstrap --quiet --variant=minbase --include="$packages" ${options[@]:+"${options[@]}"} "$2" "$root" || return 1
  mkdir -p "$root/tmp/wheel"
  cp "$wheel" "$root/tmp/wheel/"
  cp tests/installed_job.py "$root/tmp/"
  cp --remove-destination "$(realpath /etc/resolv.conf)" "$root/etc/resolv.conf"
  if [[ -n ${PIP_CERT:-} ]]; then cp "$PIP_CERT" "$root/tmp/certificates.pem"; fi
  # Mounts of its own, which go with it. What is in single quotes the inner shell expands.
  # shellcheck disable=SC2016
  unshare --mount --pid --fork bash -c '
    set -euo pipefail
    mount --make-rprivate /
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    exec chroot "$1" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
      TORCH="$2" CERTIFICATES="$3" bash -c "
        set -euo pipefail
        if command -v cc || command -v c++; then echo \"there is a compiler here\" >&2; exit 1; fi
        if [[ -n \$CERTIFICATES ]]; then export PIP_CERT=/tmp/certificates.pem; fi
        python3 -m venv /env
        /env/bin/pip install --quiet --no-compile --no-cache-dir torch\${TORCH:+==\$TORCH} numpy
        /env/bin/pip install --quiet --no-compile --no-index --no-deps /tmp/wheel/*.whl
        /env/bin/python /tmp/installed_job.py
        /env/bin/pip uninstall --quiet --yes sluice
        if find /env -name \"*sluice*\" | grep .; then echo \"left behind by pip uninstall\" >&2; exit 1; fi"
  ' try "$root" "$torch" "${PIP_CERT:-}" || return 1
}

for name in debian-12 ubuntu-24.04; do
  echo "==> $name"
  if ! try "$name" "${suite[$name]}"; then
    echo "fresh_roots: $name has failed" >&2
    failed=1
  fi
  rm -rf "build/fresh-$name"
done
exit "$failed"
