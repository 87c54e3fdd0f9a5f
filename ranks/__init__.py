"""The processes of a run: how they find one another, wait for one another, and stop together.

Every room but common/ may import this one. It imports common/.
"""
