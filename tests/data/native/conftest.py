"""The C core, which both files of tests compare with NumPy and Python."""

import ctypes
import shutil

import pytest

from jtrain.data.native.library import LIBRARY, core, load


@pytest.fixture(name="library", scope="module")
def fixture_library() -> ctypes.CDLL:
    """The core of this checkout; where there is a C compiler, it must have been built."""
    if (library := core()) is None:
        assert shutil.which("cc") is None, load(LIBRARY)[1]
        pytest.skip("no C compiler here")
    return library
