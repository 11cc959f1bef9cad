"""The inner loops of reading, in C."""
