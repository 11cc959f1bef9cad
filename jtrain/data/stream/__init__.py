"""Order of samples: which chunk of which source is read when."""
