"""What every command shares: command line, limits of values, masked secrets, errors, ranks that stop together, key tables.

Anyone may come in. Imports nothing of the project.
"""
