"""Shipped environments, one folder each. Only the registry of `ludus.envs` imports them."""
