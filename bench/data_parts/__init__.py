"""Parts of the benchmark `data`: corpora, the processes that read them, and what is measured of them."""
