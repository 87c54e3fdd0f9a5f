"""The way of LAION's pictures, from tables of URLs to tars: python -m prepare.laion.

Each stage is a command. prepare.shards and prepare.latents go on from the tars, and `all` walks the whole way.
"""
