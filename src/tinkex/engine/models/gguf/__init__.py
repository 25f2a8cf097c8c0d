"""Converts GGUF files to Hugging Face model folders, bit-exactly and one tensor at a time.

Hand-written: transformers loads the whole model as float32, and the `gguf` package only reads and
dequantizes; the names, config, tokenizer and safetensors output would still be ours to write.
"""
