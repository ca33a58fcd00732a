"""Mathematical answers: parsing, normalization, equivalence."""
