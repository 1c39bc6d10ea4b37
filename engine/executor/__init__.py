"""What computes a step: one file a backend."""
