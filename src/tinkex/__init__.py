"""tinkex: train and serve LoRA adapters through the Tinker API.

`import tinkex as tinker` runs scripts written for the official package. A name is imported when
it is first used, so that importing this package is fast.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from tinkex import auth as auth
    from tinkex import types as types
    from tinkex.as_tinker import install_as_tinker as install_as_tinker
    from tinkex.client.admin import AdminClient as AdminClient
    from tinkex.client.compat import RequestOptions as RequestOptions
    from tinkex.client.compat import Timeout as Timeout
    from tinkex.client.config import Config as Config
    from tinkex.client.custom_loss import LossHandle as LossHandle
    from tinkex.client.custom_loss import PerDatumLossFn as PerDatumLossFn
    from tinkex.client.future import APIFuture as APIFuture
    from tinkex.client.http import HttpResponse
    from tinkex.client.metrics import Metrics as Metrics
    from tinkex.client.metrics import QueueChanged as QueueChanged
    from tinkex.client.metrics import RequestDone as RequestDone
    from tinkex.client.metrics import Timing as Timing
    from tinkex.client.queue_state import QueueState as QueueState
    from tinkex.client.rest import RestClient as RestClient
    from tinkex.client.retry import RetryConfig as RetryConfig
    from tinkex.client.sampling import SamplingClient as SamplingClient
    from tinkex.client.service import ServiceClient as ServiceClient
    from tinkex.client.training import TrainingClient as TrainingClient
    from tinkex.errors import APIConnectionError as APIConnectionError
    from tinkex.errors import APIError as APIError
    from tinkex.errors import APIResponseValidationError as APIResponseValidationError
    from tinkex.errors import APIStatusError as APIStatusError
    from tinkex.errors import APITimeoutError as APITimeoutError
    from tinkex.errors import AuthenticationError as AuthenticationError
    from tinkex.errors import BadRequestError as BadRequestError
    from tinkex.errors import BillingError as BillingError
    from tinkex.errors import ClientClosed as ClientClosed
    from tinkex.errors import ConfigError as ConfigError
    from tinkex.errors import ConflictError as ConflictError
    from tinkex.errors import ConnectTimeoutError as ConnectTimeoutError
    from tinkex.errors import DownloadError as DownloadError
    from tinkex.errors import ExperimentalWarning as ExperimentalWarning
    from tinkex.errors import InternalServerError as InternalServerError
    from tinkex.errors import InvalidInput as InvalidInput
    from tinkex.errors import NotFoundError as NotFoundError
    from tinkex.errors import PermissionDeniedError as PermissionDeniedError
    from tinkex.errors import PromiseExpiredError as PromiseExpiredError
    from tinkex.errors import RateLimitError as RateLimitError
    from tinkex.errors import RequestFailedError as RequestFailedError
    from tinkex.errors import ResultTimeoutError as ResultTimeoutError
    from tinkex.errors import TinkerError as TinkerError
    from tinkex.errors import TinkexError as TinkexError
    from tinkex.errors import UnprocessableEntityError as UnprocessableEntityError
    from tinkex.errors import WrongThread as WrongThread
    from tinkex.logs import attach_logger as attach_logger
    from tinkex.logs import detach_logger as detach_logger
    from tinkex.types import AdamOptimizerConfig as AdamOptimizerConfig
    from tinkex.types import AdamParams as AdamParams
    from tinkex.types import Checkpoint as Checkpoint
    from tinkex.types import CheckpointType as CheckpointType
    from tinkex.types import Datum as Datum
    from tinkex.types import DimuonOptimizerConfig as DimuonOptimizerConfig
    from tinkex.types import DimuonParams as DimuonParams
    from tinkex.types import DmelChunk as DmelChunk
    from tinkex.types import EncodedTextChunk as EncodedTextChunk
    from tinkex.types import ForwardBackwardOutput as ForwardBackwardOutput
    from tinkex.types import LoraConfig as LoraConfig
    from tinkex.types import ModelID as ModelID
    from tinkex.types import ModelInput as ModelInput
    from tinkex.types import ModelInputChunk as ModelInputChunk
    from tinkex.types import OptimParams as OptimParams
    from tinkex.types import OptimStepRequest as OptimStepRequest
    from tinkex.types import OptimStepResponse as OptimStepResponse
    from tinkex.types import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from tinkex.types import PromptProvenanceSpan as PromptProvenanceSpan
    from tinkex.types import SampledProvenanceSpan as SampledProvenanceSpan
    from tinkex.types import SampledSequence as SampledSequence
    from tinkex.types import SampleRequest as SampleRequest
    from tinkex.types import SampleResponse as SampleResponse
    from tinkex.types import SamplingParams as SamplingParams
    from tinkex.types import StopReason as StopReason
    from tinkex.types import TensorData as TensorData
    from tinkex.types import TensorDtype as TensorDtype
    from tinkex.types import TrainingRun as TrainingRun

__title__ = "tinkex"
if TYPE_CHECKING:
    __version__: str
    APIResponse = AsyncAPIResponse = HttpResponse

#: The module of each public name; imported at first use.
_NAMES_BY_MODULE = {
    "tinkex.as_tinker": "install_as_tinker",
    "tinkex.client.admin": "AdminClient",
    "tinkex.client.config": "Config",
    "tinkex.client.custom_loss": "LossHandle PerDatumLossFn",
    "tinkex.client.future": "APIFuture",
    "tinkex.client.compat": "RequestOptions Timeout",
    "tinkex.client.queue_state": "QueueState",
    "tinkex.client.rest": "RestClient",
    "tinkex.client.sampling": "SamplingClient",
    "tinkex.client.retry": "RetryConfig",
    "tinkex.client.service": "ServiceClient",
    "tinkex.client.metrics": "Metrics QueueChanged RequestDone Timing",
    "tinkex.client.training": "TrainingClient",
    "tinkex.errors": (
        "APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError "
        "AuthenticationError BadRequestError BillingError ClientClosed ConfigError ConflictError "
        "ConnectTimeoutError DownloadError ExperimentalWarning InternalServerError InvalidInput "
        "NotFoundError PermissionDeniedError PromiseExpiredError RateLimitError "
        "RequestFailedError ResultTimeoutError TinkerError TinkexError UnprocessableEntityError "
        "WrongThread"
    ),
    "tinkex.logs": "attach_logger detach_logger",
    "tinkex.types": (
        "AdamOptimizerConfig AdamParams Checkpoint CheckpointType Datum DimuonOptimizerConfig "
        "DimuonParams DmelChunk EncodedTextChunk ForwardBackwardOutput LoraConfig ModelID "
        "ModelInput ModelInputChunk OptimParams OptimStepRequest OptimStepResponse "
        "ParsedCheckpointTinkerPath PromptProvenanceSpan SampleRequest SampleResponse "
        "SampledProvenanceSpan SampledSequence SamplingParams StopReason TensorData TensorDtype "
        "TrainingRun"
    ),
}
_MODULE_BY_NAME = {name: home for home, names in _NAMES_BY_MODULE.items() for name in names.split()}
_MODULES = ("auth", "types")
#: Names that the official package has but does not export.
_UNEXPORTED_NAMES = {
    "APIResponse": ("tinkex.client.http", "HttpResponse"),
    "AsyncAPIResponse": ("tinkex.client.http", "HttpResponse"),
}

__all__ = sorted([*_MODULE_BY_NAME, *_MODULES, "__title__", "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("tinkex.settings").package_version()
    if name in (*_MODULES, "lib"):
        return importlib.import_module(f"tinkex.{name}")
    home, attribute = _UNEXPORTED_NAMES.get(name) or (_MODULE_BY_NAME.get(name), name)
    if home is None:
        raise AttributeError(f"module 'tinkex' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _OfficialPathFinder:
    """Finds modules of the official package's layout, such as `tinkex.lib`."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of such a module; runs after all other finders."""
        if not fullname.startswith("tinkex."):
            return None
        official_paths = importlib.import_module("tinkex.official_paths")
        spec: ModuleSpec | None = official_paths.find_spec(fullname)
        return spec


sys.meta_path.append(_OfficialPathFinder)
