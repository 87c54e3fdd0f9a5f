"""Methods that change a training step: a Composer Algorithm a file, chosen by the key `algorithms`. None imports another.

They are imported by name, as a user's own classes are. The checks before a run ask each that has a method
`problem(family, keys)` why this run cannot use it. This room imports model.py and the rooms below.
"""
