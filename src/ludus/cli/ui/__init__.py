"""What commands print: progress, tables, curves, transcripts."""
