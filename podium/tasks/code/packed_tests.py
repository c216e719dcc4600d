"""Reads LiveCodeBench's private tests as published: JSON that is pickled, compressed and encoded in base64."""

import base64
import binascii
import io
import pickle
import zlib

MOST_BYTES = 2**30
"""Maximum bytes of unpacked tests; the largest published ones have about a tenth of this."""


class _TextOnly(pickle.Unpickler):
    """Unpickles only strings and plain containers; refuses pickles that refer to a class or a function."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, but only text is read")


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
