"""What every command shares: command line, limits of values, masked secrets, errors, ranks that stop together, key tables,
files written whole, private names of libraries.

Anyone may come in. Imports nothing of the project; describe.py loads the modules whose keys a page asks for.
"""
