"""Short causal convolution."""
