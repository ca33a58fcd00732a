"""Tables of accepted and rejected pairs, one module a verifier."""
