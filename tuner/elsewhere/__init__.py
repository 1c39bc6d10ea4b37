"""Results that were measured elsewhere: one reader a format, all to the same stages."""
