"""Download LAION's images: from tables of URLs to tars: python -m prepare.laion.

Only tests import this room. It imports prepare/ and the floors below.
"""
