"""Rows of tokens for the learner: packing, shared prefixes, trees, sums over the vocabulary in chunks."""
