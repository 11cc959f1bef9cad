"""Errors that a user can fix (`UserError`, exit code 2), and suggestions for misspelt names."""

from jtrain_kernels.errors import FileError, UserError, did_you_mean

__all__ = ["FileError", "UserError", "did_you_mean"]
