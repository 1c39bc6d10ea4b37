"""From streams and scrapes to figures."""
