"""Proofs in propositional logic, checked by a Metamath verifier."""
