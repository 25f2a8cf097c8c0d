#!/usr/bin/env bash
# Installs with apt-get what the tests need and the system lacks: a C compiler, Python's headers, PostgreSQL, Chromium and curl.
# Where that cannot be done it says so and goes on: only the tests that need them will fail.
set -euo pipefail

has_any() { local name; for name; do command -v "$name" >/dev/null && return 0; done; return 1; }

missing=()
has_any cc gcc clang || missing+=(gcc libc6-dev)
has_headers='import os, sysconfig; exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
"${PYTHON:-python3}" -c "$has_headers" || missing+=(python3-dev)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || has_any initdb || missing+=(postgresql)
has_any chromium chromium-browser google-chrome || missing+=(chromium)
has_any curl || missing+=(curl)
[ ${#missing[@]} -eq 0 ] && exit 0

give_up() { echo "$0: $1; the tests need: ${missing[*]}" >&2; exit 0; }

has_any apt-get || give_up "there is no apt-get here"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  has_any sudo || give_up "neither root nor sudo"
  as_root=(sudo)
fi
# RUNLEVEL=1: the packages must not start services of their own.
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq "$@" >/dev/null; }

echo "Installing ${missing[*]}"
apt update || give_up "apt-get update failed"
apt install -y --no-install-recommends "${missing[@]}" || give_up "apt-get install failed"
