"""Tensor operations the engine computes with."""
