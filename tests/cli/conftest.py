"""Fixtures that commands share with the package that they call."""

from tests.checkpoint.conftest import fill, make_like

__all__ = ["fill", "make_like"]
