"""Reads the private tests of LiveCodeBench as they are published: JSON, pickled, compressed, and in base64."""

import base64
import binascii
import io
import pickle
import zlib

MOST_BYTES = 2**30
"""Bytes of unpacked tests that are read; the largest that are published have about a tenth."""


class _TextOnly(pickle.Unpickler):
    """Loads texts and plain containers; a pickle that names a class or a function runs none of it."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and only text is read")


def unpacked(packed: str) -> str:
    """The JSON text of packed tests. Raises ValueError if they are packed in another way."""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
        if not inflate.eof:
            raise ValueError(f"more than {MOST_BYTES} bytes, or cut off")
        text = _TextOnly(io.BytesIO(raw)).load()
    except (ValueError, binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, IndexError) as error:
        raise ValueError(f"neither JSON nor LiveCodeBench's packed tests ({error})") from error
    if not isinstance(text, str):
        raise ValueError(f"packed tests hold {type(text).__name__}, not the text of a JSON list")
    return text
