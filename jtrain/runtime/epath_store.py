"""The type of paths in object stores. Imports etils, so that only runs in stores import this module."""

from pathlib import Path

from etils.epath.gpath import PosixGPath


class StorePath(PosixGPath, Path):  # pyright: ignore[reportIncompatibleMethodOverride]: options that etils lacks
    """Path behind gs:// or s3:// with the methods of `pathlib.Path`: etils implements them, through fsspec."""
