"""Command lines: one module per verb, each with `parser()` and `main(argv)`."""
