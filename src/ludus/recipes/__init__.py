"""Recipes: one folder each, with `config.toml` and a README."""
