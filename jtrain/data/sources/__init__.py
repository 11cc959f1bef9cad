"""Sources: files in many formats, local or remote, as shuffled documents."""
