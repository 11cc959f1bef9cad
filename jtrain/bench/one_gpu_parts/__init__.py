"""Parts of the benchmark `one_gpu`: its steps, and the process of one."""
