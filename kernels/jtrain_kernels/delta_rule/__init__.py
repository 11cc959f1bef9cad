"""Gated delta rule."""
