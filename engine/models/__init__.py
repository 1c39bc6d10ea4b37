"""Model families and their weights."""
