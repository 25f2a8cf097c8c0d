"""Virtual modules for the official package's import paths: tinkex.types.tensor_data, tinkex.lib ...

The official package has one module per type, and its clients in `tinker.lib`. Here these modules
have no files: they are created on import and resolve their names on first use. A test compares
the table with the installed official package.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

#: Modules of `tinker.types` whose name is not the snake case of their only class.
_TYPE_MODULES: Mapping[str, str] = {
    "billing_usage_request": "GetBillingUsageRequest",
    "billing_usage_response": """
        BillingEventInfo BillingUsageEvent BillingUsageResponse BillingUsageSession
        CheckpointBillingEvent SamplingPrefillBillingEvent SamplingSampleBillingEvent
        StorageBillingEvent TrainingBillingEvent
    """,
    "checkpoint": "Checkpoint CheckpointType ParsedCheckpointTinkerPath",
    "current_checkpoint_storage_usage_request": "GetCurrentCheckpointStorageUsageRequest",
    "current_checkpoint_storage_usage_response": """
        CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse
    """,
    "custom_loss_graph": "CustomLossGraph CustomLossNode CustomLossNodeOp",
    "custom_loss_input": "CustomLossInput CustomLossInputRank",
    "future_completion": "FutureCompletion FutureFailed FutureFinished",
    "futures_retrieve_request": "FuturesRetrieveRequest SamplingSessionFuturesTarget",
    "get_info_response": "GetInfoResponse ModelData",
    "get_server_capabilities_response": "GetServerCapabilitiesResponse SupportedModel",
    "optimizer": """
        AdamOptimizerConfig AdamParams DimuonOptimizerConfig DimuonParams OptimParams
        OptimParamsBase OptimizerConfig OptimizerConfigBase
    """,
    "provenance_spans": "PromptProvenanceSpan ProvenanceSpans SampledProvenanceSpan",
    "save_weights_external_response": """
        SaveWeightsExternalResponse SaveWeightsExternalResponseInternal
    """,
    "save_weights_for_sampler_response": """
        SaveWeightsForSamplerResponse SaveWeightsForSamplerResponseInternal
    """,
    "search_owner": "AccessibleSearchOwner OwnSearchOwner SearchOwner UserSearchOwner",
    "session_status": """
        ClientSessionFinishErrored ClientSessionFinishInterrupted ClientSessionFinishReason
        ClientSessionFinishSuccess ClientSessionFinished SessionActive SessionCancelled
        SessionFailed SessionFailedReason SessionFailedRequestReason
        SessionFailedSamplingSessionReason SessionFailedTrainingRunReason SessionStatus
    """,
    "session_status_query": """
        ActiveSessionStatusQuery CancelledSessionStatusQuery ClientFinishedSessionStatusQuery
        ClientSessionFinishReasonType FailedSessionStatusQuery SessionStatusQuery
    """,
    "shared": "UntypedAPIFuture",
    "shared.untyped_api_future": "UntypedAPIFuture",
}
_CLIENTS = "AdminClient RestClient SamplingClient ServiceClient TrainingClient"
#: All other modules: for each, its names by the module that defines them. A name that differs
#: here is written official=local.
_OTHER_MODULES: Mapping[str, Mapping[str, str]] = {
    "types.topk_logprobs": {
        "tinkex.types.sampling": """
            TopkLogprobs MASK_LOGPROB=FILLER_LOGPROB topk_to_lists=TopkLogprobs.to_rows
        """
    },
    "lib": {},
    "lib.public_interfaces": {
        "tinkex": f"{_CLIENTS} APIFuture AwaitableConcurrentFuture=APIFuture LossHandle "
        "PerDatumLossFn"
    },
    "lib.public_interfaces.admin_client": {"tinkex": "AdminClient"},
    "lib.public_interfaces.api_future": {"tinkex": "APIFuture AwaitableConcurrentFuture=APIFuture"},
    "lib.public_interfaces.custom_loss": {"tinkex": "LossHandle PerDatumLossFn"},
    "lib.public_interfaces.rest_client": {"tinkex": "RestClient"},
    "lib.public_interfaces.sampling_client": {"tinkex": "SamplingClient"},
    "lib.public_interfaces.service_client": {"tinkex": "ServiceClient"},
    "lib.public_interfaces.training_client": {"tinkex": "TrainingClient"},
    "lib.experimental": {"tinkex": "ExperimentalWarning"},
    "lib.internal_client_holder": {
        "tinkex.client.holder": "InternalClientHolder=Holder",
        "tinkex.client.io_loop": (
            "InternalClientHolderThreadSingleton=LoopSingleton "
            "_internal_client_holder_thread_singleton=LOOP_SINGLETON"
        ),
    },
    "lib.retry_handler": {"tinkex": "RetryConfig"},
    "lib.telemetry": {"tinkex.client.telemetry": "Telemetry"},
    "_exceptions": {
        "tinkex": """
            APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError
            AuthenticationError BadRequestError BillingError ConflictError InternalServerError
            NotFoundError PermissionDeniedError RateLimitError RequestFailedError TinkerError
            UnprocessableEntityError
        """
    },
    "_response": {"tinkex": "APIResponse AsyncAPIResponse"},
}
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

#: The names of a module, and for each the module and attribute it resolves to.
ModuleNames = Mapping[str, tuple[str, str]]


@cache
def official_modules() -> Mapping[str, ModuleNames]:
    """Return all virtual modules by their path below the package."""
    modules: dict[str, dict[str, tuple[str, str]]] = {}
    for path, sources in _OTHER_MODULES.items():
        modules[path] = {
            official: (source, local or official)
            for source, names in sources.items()
            for official, _, local in (name.partition("=") for name in names.split())
        }
    for module, names in _TYPE_MODULES.items():
        modules[f"types.{module}"] = {name: ("tinkex.types", name) for name in names.split()}
    grouped = {name for names in modules.values() for name in names}
    for name in set(importlib.import_module("tinkex.types").__all__) | _UNEXPORTED_TYPES:
        if name not in grouped:
            module = _WORD_BOUNDARY.sub("_", name).lower()
            modules[f"types.{module}"] = {name: ("tinkex.types", name)}
    return MappingProxyType(modules)


#: Types that have a module although `tinker.types` does not export them.
_UNEXPORTED_TYPES = {"EventType", "GenericEvent", "TryAgainResponse"}


def find_spec(fullname: str) -> ModuleSpec | None:
    """Return the spec of a virtual module below `tinkex`, or None if it does not exist."""
    path = fullname.removeprefix("tinkex.")
    modules = official_modules()
    if path not in modules:
        return None
    # A type module of the official package also exposes the types that it imports.
    fallback = "tinkex.types" if path.startswith("types.") else None
    is_package = any(other.startswith(f"{path}.") for other in modules)
    loader = LazyNameLoader(modules[path], fallback)
    return ModuleSpec(fullname, loader, is_package=is_package)


class LazyNameLoader(Loader):
    """Creates a module whose names are resolved on first use."""

    def __init__(self, names: ModuleNames, fallback: str | None = None) -> None:
        self._names = names
        self._fallback = fallback

    def exec_module(self, module: ModuleType) -> None:
        """Install the lookup function."""
        exported = sorted(name for name in self._names if not name.startswith("_"))

        def lookup(name: str) -> object:
            value = self._resolve(module.__name__, name)
            setattr(module, name, value)
            return value

        vars(module).update(
            __getattr__=lookup, __dir__=lambda: exported, __all__=exported, __doc__=__doc__
        )

    def _resolve(self, module: str, name: str) -> object:
        source, attribute = self._names.get(name, (self._fallback, name))
        if source is None or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value: object = importlib.import_module(source)
        for part in attribute.split("."):
            value = getattr(value, part)
        return value
