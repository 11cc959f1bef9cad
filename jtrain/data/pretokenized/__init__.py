"""Pretokenised corpora: built once, verified, and read by offset."""
