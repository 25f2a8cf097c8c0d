"""Which clients are run, in which versions."""

from __future__ import annotations

#: Client: what is installed into its environment.
CLIENTS = {
    "openai": ("openai==3.51.0",),
    "anthropic": ("anthropic==2.9.0",),
    # litellm imports mcp when a request has tools.
    "litellm": ("litellm==1.106.2", "mcp"),
    "langchain-openai": ("langchain-openai==1.7.3",),
    "inspect-ai": ("inspect-ai==0.3.285", "openai==3.51.0"),
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "llm": ("llm==0.36",),
}
