"""Facts from more documents than fit into the context."""
