"""The end of every GGUF file that a test writes with llama.cpp's own package."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from podium.models.files.source import ModelSource

if TYPE_CHECKING:
    import gguf  # tests skip where it is not installed


def finish(
    writer: "gguf.GGUFWriter",
    path: Path,
    tensors: Mapping[str, np.ndarray],
    formats: "Mapping[str, gguf.GGMLQuantizationType] | None",
) -> ModelSource:
    """Write what the writer was told and the tensors, those in `formats` as the bytes of that format."""
    for name, value in tensors.items():
        writer.add_tensor(name, value, raw_dtype=(formats or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("gguf", path, str(path))
