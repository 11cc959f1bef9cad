"""Order of a source's chunks, and how more files join it."""
