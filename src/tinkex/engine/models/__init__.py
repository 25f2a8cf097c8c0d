"""Base models: locating, inspecting, downloading, converting and loading them."""
