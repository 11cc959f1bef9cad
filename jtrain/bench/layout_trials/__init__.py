"""Trials of `jtrain bench layouts`: settings drawn so that pairs of them meet, a reference of its own, and
bounds.
"""
