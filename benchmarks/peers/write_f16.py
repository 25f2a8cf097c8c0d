"""Rewrite a GGUF file with weights in float16: `python write_f16.py SOURCE TARGET`.

Runs in the peers' environment, so it imports nothing of this repository.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

_OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def main() -> None:
    """Copy the metadata, and write matrices in float16 and vectors in float32."""
    source, target = sys.argv[1:]
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, field in reader.fields.items():
        if not name.startswith(_OWN_FIELDS):
            items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=items)
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weight.astype(np.float16 if weight.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
