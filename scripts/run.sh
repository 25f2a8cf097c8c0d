#!/usr/bin/env bash
# The same as pipelines/run.sh, where some look for it.
exec "$(dirname "${BASH_SOURCE[0]}")/../pipelines/run.sh" "$@"
