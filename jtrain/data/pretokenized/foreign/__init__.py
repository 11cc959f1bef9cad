"""Token files of other projects, as `python -m jtrain.data adopt` reads them: one module per layout."""
