"""The shop world: find and buy a product that satisfies an instruction."""
