"""The public values and messages, with the same names as in `tinker.types`.

A name is imported when it is first used, so that importing this package is cheap.
"""

# ruff: noqa: I001 - isort would write one import statement per name

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.errors import (
        RequestErrorCategory as RequestErrorCategory,
    )
    from tinkex.types.billing import (
        AuditLogEntry as AuditLogEntry,
        AuditLogResponse as AuditLogResponse,
        AuthTokenResponse as AuthTokenResponse,
        BillingEventInfo as BillingEventInfo,
        BillingUsageEvent as BillingUsageEvent,
        BillingUsageResponse as BillingUsageResponse,
        BillingUsageSession as BillingUsageSession,
        CheckpointBillingEvent as CheckpointBillingEvent,
        CurrentCheckpointStorageUsageItem as CurrentCheckpointStorageUsageItem,
        CurrentCheckpointStorageUsageResponse as CurrentCheckpointStorageUsageResponse,
        GetBillingUsageRequest as GetBillingUsageRequest,
        GetCurrentCheckpointStorageUsageRequest as GetCurrentCheckpointStorageUsageRequest,
        SamplingPrefillBillingEvent as SamplingPrefillBillingEvent,
        SamplingSampleBillingEvent as SamplingSampleBillingEvent,
        StorageBillingEvent as StorageBillingEvent,
        TrainingBillingEvent as TrainingBillingEvent,
        UnknownBillingEvent as UnknownBillingEvent,
        WhoamiResponse as WhoamiResponse,
    )
    from tinkex.types.checkpoint_search import (
        CheckpointSearchCursor as CheckpointSearchCursor,
        CheckpointSearchRequest as CheckpointSearchRequest,
        CheckpointSearchResponse as CheckpointSearchResponse,
    )
    from tinkex.types.checkpoints import (
        Checkpoint as Checkpoint,
        CheckpointType as CheckpointType,
        CheckpointsListResponse as CheckpointsListResponse,
        CopyWeightsRequest as CopyWeightsRequest,
        CopyWeightsResponse as CopyWeightsResponse,
        Cursor as Cursor,
        ExternalWeightsUrlsResponse as ExternalWeightsUrlsResponse,
        ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
        TrainingRun as TrainingRun,
        TrainingRunsResponse as TrainingRunsResponse,
        WeightsInfoResponse as WeightsInfoResponse,
    )
    from tinkex.types.futures import (
        FutureCompletion as FutureCompletion,
        FutureFailed as FutureFailed,
        FutureFinished as FutureFinished,
        FutureRetrieveRequest as FutureRetrieveRequest,
        FutureRetrieveResponse as FutureRetrieveResponse,
        FuturesRetrieveRequest as FuturesRetrieveRequest,
        FuturesRetrieveResponse as FuturesRetrieveResponse,
        RequestFailedResponse as RequestFailedResponse,
        RequestID as RequestID,
        SamplingSessionFuturesTarget as SamplingSessionFuturesTarget,
        TryAgainResponse as TryAgainResponse,
        UntypedAPIFuture as UntypedAPIFuture,
    )
    from tinkex.types.inputs import (
        Datum as Datum,
        DmelChunk as DmelChunk,
        EncodedTextChunk as EncodedTextChunk,
        ImageAssetPointerChunk as ImageAssetPointerChunk,
        ImageChunk as ImageChunk,
        LossFnInputs as LossFnInputs,
        ModelInput as ModelInput,
        ModelInputChunk as ModelInputChunk,
        PromptProvenanceSpan as PromptProvenanceSpan,
        ProvenanceSpans as ProvenanceSpans,
        SampledProvenanceSpan as SampledProvenanceSpan,
    )
    from tinkex.types.models import (
        CreateModelRequest as CreateModelRequest,
        CreateModelResponse as CreateModelResponse,
        GetInfoRequest as GetInfoRequest,
        GetInfoResponse as GetInfoResponse,
        GetServerCapabilitiesResponse as GetServerCapabilitiesResponse,
        HealthResponse as HealthResponse,
        LoadWeightsRequest as LoadWeightsRequest,
        LoadWeightsResponse as LoadWeightsResponse,
        ModelData as ModelData,
        SaveWeightsExternalRequest as SaveWeightsExternalRequest,
        SaveWeightsExternalResponse as SaveWeightsExternalResponse,
        SaveWeightsExternalResponseInternal as SaveWeightsExternalResponseInternal,
        SaveWeightsForSamplerRequest as SaveWeightsForSamplerRequest,
        SaveWeightsForSamplerResponse as SaveWeightsForSamplerResponse,
        SaveWeightsForSamplerResponseInternal as SaveWeightsForSamplerResponseInternal,
        SaveWeightsRequest as SaveWeightsRequest,
        SaveWeightsResponse as SaveWeightsResponse,
        SupportedModel as SupportedModel,
        UnloadModelRequest as UnloadModelRequest,
        UnloadModelResponse as UnloadModelResponse,
    )
    from tinkex.types.optimizers import (
        AdamOptimizerConfig as AdamOptimizerConfig,
        AdamParams as AdamParams,
        DimuonOptimizerConfig as DimuonOptimizerConfig,
        DimuonParams as DimuonParams,
        OptimParams as OptimParams,
        OptimParamsBase as OptimParamsBase,
        OptimizerConfig as OptimizerConfig,
        OptimizerConfigBase as OptimizerConfigBase,
    )
    from tinkex.types.sampling import (
        PromptAltTokens as PromptAltTokens,
        SampleRequest as SampleRequest,
        SampleResponse as SampleResponse,
        SampledSequence as SampledSequence,
        SamplingParams as SamplingParams,
        StopReason as StopReason,
        TopkLogprobs as TopkLogprobs,
    )
    from tinkex.types.session_search import (
        AccessibleSearchOwner as AccessibleSearchOwner,
        ActiveSessionStatusQuery as ActiveSessionStatusQuery,
        CancelledSessionStatusQuery as CancelledSessionStatusQuery,
        ClientFinishedSessionStatusQuery as ClientFinishedSessionStatusQuery,
        ClientSessionFinishErrored as ClientSessionFinishErrored,
        ClientSessionFinishInterrupted as ClientSessionFinishInterrupted,
        ClientSessionFinishReason as ClientSessionFinishReason,
        ClientSessionFinishReasonType as ClientSessionFinishReasonType,
        ClientSessionFinishSuccess as ClientSessionFinishSuccess,
        ClientSessionFinished as ClientSessionFinished,
        FailedSessionStatusQuery as FailedSessionStatusQuery,
        OwnSearchOwner as OwnSearchOwner,
        SearchOwner as SearchOwner,
        SessionActive as SessionActive,
        SessionCancelled as SessionCancelled,
        SessionFailed as SessionFailed,
        SessionFailedReason as SessionFailedReason,
        SessionFailedRequestReason as SessionFailedRequestReason,
        SessionFailedSamplingSessionReason as SessionFailedSamplingSessionReason,
        SessionFailedTrainingRunReason as SessionFailedTrainingRunReason,
        SessionSearchCursor as SessionSearchCursor,
        SessionSearchRequest as SessionSearchRequest,
        SessionSearchResponse as SessionSearchResponse,
        SessionStatus as SessionStatus,
        SessionStatusQuery as SessionStatusQuery,
        SessionSummary as SessionSummary,
        UserSearchOwner as UserSearchOwner,
    )
    from tinkex.types.sessions import (
        ClientConfigRequest as ClientConfigRequest,
        ClientConfigResponse as ClientConfigResponse,
        ClientDynamicConfigResponse as ClientDynamicConfigResponse,
        CreateSamplingSessionRequest as CreateSamplingSessionRequest,
        CreateSamplingSessionResponse as CreateSamplingSessionResponse,
        CreateSessionRequest as CreateSessionRequest,
        CreateSessionResponse as CreateSessionResponse,
        GetSamplerResponse as GetSamplerResponse,
        GetSessionResponse as GetSessionResponse,
        JoinSamplingSessionRequest as JoinSamplingSessionRequest,
        JoinSamplingSessionResponse as JoinSamplingSessionResponse,
        ListSessionsResponse as ListSessionsResponse,
        SessionHeartbeatRequest as SessionHeartbeatRequest,
        SessionHeartbeatResponse as SessionHeartbeatResponse,
    )
    from tinkex.types.telemetry import (
        EventType as EventType,
        GenericEvent as GenericEvent,
        SessionEndEvent as SessionEndEvent,
        SessionStartEvent as SessionStartEvent,
        Severity as Severity,
        TelemetryBatch as TelemetryBatch,
        TelemetryEvent as TelemetryEvent,
        TelemetryResponse as TelemetryResponse,
        TelemetrySendRequest as TelemetrySendRequest,
        UnhandledExceptionEvent as UnhandledExceptionEvent,
    )
    from tinkex.types.tensors import (
        TensorData as TensorData,
        TensorDtype as TensorDtype,
    )
    from tinkex.types.training import (
        CreateCustomLossRequest as CreateCustomLossRequest,
        CreateCustomLossResponse as CreateCustomLossResponse,
        CustomLossGraph as CustomLossGraph,
        CustomLossInput as CustomLossInput,
        CustomLossInputRank as CustomLossInputRank,
        CustomLossNode as CustomLossNode,
        CustomLossNodeOp as CustomLossNodeOp,
        ForwardBackwardInput as ForwardBackwardInput,
        ForwardBackwardOutput as ForwardBackwardOutput,
        ForwardBackwardRequest as ForwardBackwardRequest,
        ForwardRequest as ForwardRequest,
        LoraConfig as LoraConfig,
        LossFnOutput as LossFnOutput,
        LossFnType as LossFnType,
        ModelID as ModelID,
        OptimStepRequest as OptimStepRequest,
        OptimStepResponse as OptimStepResponse,
        RunMetricsResponse as RunMetricsResponse,
        RunSessionStatus as RunSessionStatus,
        RunStep as RunStep,
    )

#: The names that each module defines.
_NAMES_BY_MODULE = {
    "tinkex.errors": """
        RequestErrorCategory
    """,
    "tinkex.types.billing": """
        AuditLogEntry AuditLogResponse AuthTokenResponse BillingEventInfo
        BillingUsageEvent BillingUsageResponse BillingUsageSession CheckpointBillingEvent
        CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse
        GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest
        SamplingPrefillBillingEvent SamplingSampleBillingEvent StorageBillingEvent
        TrainingBillingEvent UnknownBillingEvent WhoamiResponse
    """,
    "tinkex.types.checkpoint_search": """
        CheckpointSearchCursor CheckpointSearchRequest CheckpointSearchResponse
    """,
    "tinkex.types.checkpoints": """
        Checkpoint CheckpointType CheckpointsListResponse CopyWeightsRequest
        CopyWeightsResponse Cursor ExternalWeightsUrlsResponse ParsedCheckpointTinkerPath
        TrainingRun TrainingRunsResponse WeightsInfoResponse
    """,
    "tinkex.types.futures": """
        FutureCompletion FutureFailed FutureFinished FutureRetrieveRequest
        FutureRetrieveResponse FuturesRetrieveRequest FuturesRetrieveResponse
        RequestFailedResponse RequestID SamplingSessionFuturesTarget TryAgainResponse
        UntypedAPIFuture
    """,
    "tinkex.types.inputs": """
        Datum DmelChunk EncodedTextChunk ImageAssetPointerChunk ImageChunk LossFnInputs
        ModelInput ModelInputChunk PromptProvenanceSpan ProvenanceSpans
        SampledProvenanceSpan
    """,
    "tinkex.types.models": """
        CreateModelRequest CreateModelResponse GetInfoRequest GetInfoResponse
        GetServerCapabilitiesResponse HealthResponse LoadWeightsRequest
        LoadWeightsResponse ModelData SaveWeightsExternalRequest
        SaveWeightsExternalResponse SaveWeightsExternalResponseInternal
        SaveWeightsForSamplerRequest SaveWeightsForSamplerResponse
        SaveWeightsForSamplerResponseInternal SaveWeightsRequest SaveWeightsResponse
        SupportedModel UnloadModelRequest UnloadModelResponse
    """,
    "tinkex.types.optimizers": """
        AdamOptimizerConfig AdamParams DimuonOptimizerConfig DimuonParams OptimParams
        OptimParamsBase OptimizerConfig OptimizerConfigBase
    """,
    "tinkex.types.sampling": """
        PromptAltTokens SampleRequest SampleResponse SampledSequence SamplingParams
        StopReason TopkLogprobs
    """,
    "tinkex.types.session_search": """
        AccessibleSearchOwner ActiveSessionStatusQuery CancelledSessionStatusQuery
        ClientFinishedSessionStatusQuery ClientSessionFinishErrored
        ClientSessionFinishInterrupted ClientSessionFinishReason
        ClientSessionFinishReasonType ClientSessionFinishSuccess ClientSessionFinished
        FailedSessionStatusQuery OwnSearchOwner SearchOwner SessionActive SessionCancelled
        SessionFailed SessionFailedReason SessionFailedRequestReason
        SessionFailedSamplingSessionReason SessionFailedTrainingRunReason
        SessionSearchCursor SessionSearchRequest SessionSearchResponse SessionStatus
        SessionStatusQuery SessionSummary UserSearchOwner
    """,
    "tinkex.types.sessions": """
        ClientConfigRequest ClientConfigResponse ClientDynamicConfigResponse
        CreateSamplingSessionRequest CreateSamplingSessionResponse CreateSessionRequest
        CreateSessionResponse GetSamplerResponse GetSessionResponse
        JoinSamplingSessionRequest JoinSamplingSessionResponse ListSessionsResponse
        SessionHeartbeatRequest SessionHeartbeatResponse
    """,
    "tinkex.types.telemetry": """
        EventType GenericEvent SessionEndEvent SessionStartEvent Severity TelemetryBatch
        TelemetryEvent TelemetryResponse TelemetrySendRequest UnhandledExceptionEvent
    """,
    "tinkex.types.tensors": """
        TensorData TensorDtype
    """,
    "tinkex.types.training": """
        CreateCustomLossRequest CreateCustomLossResponse CustomLossGraph CustomLossInput
        CustomLossInputRank CustomLossNode CustomLossNodeOp
        ForwardBackwardInput ForwardBackwardOutput ForwardBackwardRequest ForwardRequest
        LoraConfig LossFnOutput LossFnType ModelID OptimStepRequest OptimStepResponse
        RunMetricsResponse RunSessionStatus RunStep
    """,
}
_MODULE_BY_NAME = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()
}
#: Types of fields and bases of public types; `tinker.types` does not export them either.
_UNEXPORTED_NAMES = {
    "CustomLossNodeOp",
    "GenericEvent",
    "OptimParamsBase",
    "OptimizerConfigBase",
    "TopkLogprobs",
    "TryAgainResponse",
    "UnknownBillingEvent",
}
#: Types of tinkex servers only; `tinker.types` does not have them.
_OWN = {"RunMetricsResponse", "RunSessionStatus", "RunStep"}
__all__ = sorted(_MODULE_BY_NAME.keys() - _UNEXPORTED_NAMES - _OWN)

# Hidden from type checkers: they would accept every misspelled name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_BY_NAME:
            # `tinker.types` has its modules as attributes, such as `types.tensor_data`.
            if name.islower() and importlib.util.find_spec(f"{__name__}.{name}") is not None:
                return importlib.import_module(f"{__name__}.{name}")
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
