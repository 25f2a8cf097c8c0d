"""The inference endpoints of both API families."""

from __future__ import annotations

from tinkex.server.inference import (
    anthropic_endpoints,
    anthropic_models,
    openai_chat,
    openai_completions,
    openai_models,
    openai_tokenizers,
)
from tinkex.server.inference.inference_call import InferenceRoute

INFERENCE_ROUTES: tuple[InferenceRoute, ...] = (
    *openai_chat.ROUTES,
    *openai_completions.ROUTES,
    *openai_models.ROUTES,
    *openai_tokenizers.ROUTES,
    *anthropic_endpoints.ROUTES,
    *anthropic_models.ROUTES,
)
