"""What every command shares: errors, files written whole, logging, command lines, limits of values, masked secrets.

Every room may import this one. It imports none: static_schema.py reads their source.
"""
