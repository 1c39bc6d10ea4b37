"""Parameters, ranges and presets: YAML, no code."""
