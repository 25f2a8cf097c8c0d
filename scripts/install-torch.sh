#!/usr/bin/env bash
# Installs PyTorch for a Python: install-torch.sh PYTHON VERSION
# On Linux without an NVIDIA GPU it takes PyTorch's CPU build, which is a tenth of the size of the CUDA build on PyPI. Where
# that index cannot be reached, or pip has package sources of its own, it takes what those offer.
set -euo pipefail

python=$1 version=$2
cpu_index=https://download.pytorch.org/whl/cpu

install() { "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@" "torch==$version"; }
is_installed() { "$python" -c "from importlib.metadata import version; exit(version('torch').split('+')[0] != '$version')" 2>/dev/null; }
has_gpu() { [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; }
has_own_sources() { "$python" -m pip config list 2>/dev/null | grep -Eq '(index-url|find-links)='; }

if is_installed; then exit 0; fi
if [ "$(uname -s)" = Linux ] && ! has_gpu && ! has_own_sources; then
  # Without dependencies: the next installation takes those from the usual index.
  install --no-deps --index-url "$cpu_index" --retries 1 --timeout 15 && exit 0
  echo "$0: $cpu_index cannot be used; taking the PyTorch of the usual index" >&2
fi
install
