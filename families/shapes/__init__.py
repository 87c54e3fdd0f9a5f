"""The miniature's family, `shapes`: its scenes and captions, its networks, and the family built from them.

families/, evaluation/ and prepare/shapes/ import this room. It imports weights/ and its neighbours in families/.
"""
