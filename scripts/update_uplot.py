"""Update or check uPlot, the charting library in the dashboard's static files.

scripts/update_uplot.py               # compare the files with the recorded digests
scripts/update_uplot.py 1.6.32        # fetch this version with npm and record its digests
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENDOR = ROOT / "src/tinkex/server/dashboard/static/vendor"
RECORD = VENDOR / "uplot.json"
#: Paths in the npm package, and the names of the files here.
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "uPlot.LICENSE.txt",
}


def main(arguments: list[str]) -> int:
    """Update to the version in the arguments, or check the files."""
    if arguments:
        update(arguments[0])
    wrong = find_changes()
    for name in wrong:
        sys.stderr.write(f"{name} differs from its digest in {RECORD.name}\n")
    return 1 if wrong else 0


def update(version: str) -> None:
    """Fetch a version; npm checks the archive against the registry's digest."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"uplot@{version}", "--json", "--pack-destination", folder]
        packed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120)
        (package,) = json.loads(packed.stdout)
        with tarfile.open(Path(folder) / package["filename"]) as archive:
            for member, name in FILES.items():
                content = archive.extractfile(member)
                assert content is not None, member
                (VENDOR / name).write_bytes(content.read())
    record = {
        "name": "uplot",
        "version": package["version"],
        "license": "MIT",
        "integrity": package["integrity"],
        "sha256": {name: digest(VENDOR / name) for name in FILES.values()},
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def find_changes() -> list[str]:
    """The files that differ from the record."""
    recorded = json.loads(RECORD.read_text())["sha256"]
    return [name for name in FILES.values() if digest(VENDOR / name) != recorded.get(name)]


def digest(path: Path) -> str:
    """The SHA-256 digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
