"""The `ludus` command line."""
