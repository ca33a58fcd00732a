"""Readers of data from untrusted sources: files from elsewhere, models, tools, sandboxes, remote servers."""
