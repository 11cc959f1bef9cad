"""Adapters of low rank: trained matrices beside those of a frozen model."""
