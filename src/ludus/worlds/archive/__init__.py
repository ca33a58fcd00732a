"""A count over more documents than fit into the context."""
