"""Links between the processes of a run: authenticated TCP connections for plain data, arrays and files."""
