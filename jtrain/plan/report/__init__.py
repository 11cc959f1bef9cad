"""Printed plans: summary, sheet, and the tables of the survey."""
