#!/usr/bin/env bash
# Alias of pipelines/run.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/../pipelines/run.sh" "$@"
