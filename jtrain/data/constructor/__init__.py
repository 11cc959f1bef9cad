"""Data Constructors: plan the steps and fill the rows of one host."""
