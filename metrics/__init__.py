"""Pure computations of what an evaluation measures: FID and CLIP score, and the networks that they look through."""
