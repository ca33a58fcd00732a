"""Readers of data from untrusted sources: files, models, tools, sandboxes, remote servers."""
