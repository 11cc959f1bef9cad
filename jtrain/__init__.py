"""jtrain: train large language models in JAX, from files on disk to a checkpoint that other tools read."""
