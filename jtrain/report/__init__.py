"""Reports: tables and pages described as plain data, and what prints them or makes HTML of them."""
