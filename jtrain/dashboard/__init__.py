"""A live page of runs, and their newest numbers for Prometheus, from the files of their workdirs."""
