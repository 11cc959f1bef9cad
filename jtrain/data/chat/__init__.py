"""Chats: their messages, the templates that write them as text, and what of the text a model samples."""
