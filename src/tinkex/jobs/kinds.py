"""What kinds of work there are, and which of them change a model."""

from __future__ import annotations

from enum import StrEnum


class JobKind(StrEnum):
    """A kind of work, named like its endpoint."""

    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"
    CREATE_CUSTOM_LOSS = "create_custom_loss"
    SAMPLE = "asample"


#: Passes of several models can share one run of the engine.
PASS_KINDS = frozenset({JobKind.FORWARD, JobKind.FORWARD_BACKWARD})
#: Results that cross the wire as protobuf.
PROTO_RESULT_KINDS = frozenset({JobKind.FORWARD, JobKind.FORWARD_BACKWARD, JobKind.SAMPLE})
