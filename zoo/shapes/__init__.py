"""The family of the miniature: its world of scenes, its networks, and how they make a family.

zoo/, evaluation/ and prepare/shapes/ come in. Imports weights/ and its neighbours in zoo/.
"""
