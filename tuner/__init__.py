"""kneetune: the tuning job."""
