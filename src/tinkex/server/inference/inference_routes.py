"""The inference endpoints of both API families."""

from __future__ import annotations

from tinkex.server.inference import openai_chat, openai_completions, openai_models
from tinkex.server.inference.inference_call import InferenceRoute

INFERENCE_ROUTES: tuple[InferenceRoute, ...] = (
    *openai_chat.ROUTES,
    *openai_completions.ROUTES,
    *openai_models.ROUTES,
)
