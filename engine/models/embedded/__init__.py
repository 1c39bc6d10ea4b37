"""The model that ships with this package: a small Qwen3 shape, whose weights are made up from a seed at start."""
