"""The research world: inverted questions and reports over a web of linked pages."""
