"""Run a trainer by stage name: `python -m tinkex.pipeline.run.trainer pretrain --help`."""

from __future__ import annotations

import sys

from tinkex.pipeline.entry import main
from tinkex.pipeline.settings_sources import STAGE_DESCRIPTIONS

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in STAGE_DESCRIPTIONS:
        sys.exit(f"the first argument must be a stage: {', '.join(STAGE_DESCRIPTIONS)}")
    sys.exit(main(sys.argv.pop(1)))
