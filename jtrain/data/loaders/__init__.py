"""Source Loaders: processes that read and tokenise documents, and their pool."""
