"""Loads the C core, if this installation has one that was built from its source."""

import ctypes
import functools
import hashlib
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("core.c")
LIBRARY = Path(__file__).with_name("_core.so")
"""Built by hatch_build.py: with a wheel, with `pip install -e .`, or by itself."""

FUNCTIONS = {"fill_rows": "AAAANNNAAAAAn", "find_documents": "NAAAAAAAA", "json_chunks": "NAAAAANANAA"}
"""Arguments of each function: A an array's address, N an int64, n an int32. All return an int64."""

_KINDS = {"A": ctypes.c_void_p, "N": ctypes.c_int64, "n": ctypes.c_int32}

BUILD = "python hatch_build.py, in a checkout with a C compiler"


def source_hash() -> str:
    """Returns the hash of core.c that a library built from it carries."""
    return hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()


@functools.cache
def core() -> ctypes.CDLL | None:
    """Returns the C core; None if there is none, and NumPy does its work."""
    return load(LIBRARY)[0]


def core_line() -> str:
    """Returns which core runs and why, for the first lines of a run."""
    return load(LIBRARY)[1]


def load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """Returns the core in a library and what to say of it; None where NumPy does its work."""
    if not path.is_file():
        return None, f"data core: NumPy, which is slower: no C core was built ({BUILD}, builds it)"
    try:
        library = ctypes.CDLL(str(path))
        built_from = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "jtrain_core_source")))
    except (OSError, ValueError) as error:
        return None, f"data core: NumPy, which is slower: {error} ({BUILD}, builds it anew)"
    # In a checkout the source may be newer than the library.
    if built_from.decode() != source_hash():
        return (
            None,
            f"data core: NumPy, which is slower: {path} is of another core.c ({BUILD}, builds it anew)",
        )
    for name, arguments in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int64, [_KINDS[kind] for kind in arguments]
    return library, "data core: C"


def address(array: np.ndarray, dtype: type[np.generic]) -> int:
    """Returns the address of a contiguous array of a dtype, for a C function."""
    assert array.dtype == dtype, array.dtype
    assert array.flags.c_contiguous, array.strides
    return array.ctypes.data
