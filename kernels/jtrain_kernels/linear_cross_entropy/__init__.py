"""Unembedding and cross entropy in one."""
