"""Which versions the matrix has, and why these."""

from __future__ import annotations

#: Version of the official SDK: what was new in it, as far as a server notices.
SDKS = {
    "0.3.0": "the first with sessions",
    "0.6.3": "checkpoints can be published; the `tinker` command",
    "0.8.1": "torch is optional",
    "0.12.0": "`ttl_seconds`, more losses",
    "0.16.1": "the last whose chunks carry no `type`",
    "0.18.2": "results as protobuf",
    "0.22.7": "compressed requests",
    "0.25.0": "the last before `external` checkpoints",
    "0.28.1": "",
    "0.30.4": "",
    "0.33.1": "",
    "0.36.0": "the version that tinkex follows",
}
COOKBOOK = "0.5.8"
#: The SDK that the cookbook runs with.
COOKBOOK_SDK = "0.36.0"
