"""Deployable files, one file a format."""
