"""Complete examples of what others add; nothing here is used unless an entry point names it."""
