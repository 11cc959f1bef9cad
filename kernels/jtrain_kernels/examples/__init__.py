"""Complete examples of extensions; nothing here is used unless an entry point names it."""
