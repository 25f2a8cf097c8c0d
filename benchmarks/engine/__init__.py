"""The engine against PEFT + transformers: same model, same weights, same data, same threads."""
