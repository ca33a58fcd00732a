"""Output of the commands: progress, tables, curves, transcripts."""
