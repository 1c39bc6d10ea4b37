"""Pure functions from records to answers: no files, no sockets, no clocks."""
