"""One file an engine: how to start it, know it is ours, read it, stop it."""
