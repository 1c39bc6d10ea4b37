"""Readers of results that were measured elsewhere."""
