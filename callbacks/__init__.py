"""Composer callbacks, one a file."""
