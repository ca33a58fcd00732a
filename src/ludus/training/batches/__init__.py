"""Token rows for the learner: packing, shared prefixes, trees, chunked output layer."""
