"""The folder of a run: session, manifest, checkpoints, tokenizer check."""
