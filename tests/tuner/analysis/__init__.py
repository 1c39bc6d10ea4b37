"""Pure answers from measured ladders."""
