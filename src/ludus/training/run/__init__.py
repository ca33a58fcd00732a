"""Run folder: session, manifest, checkpoints, tokenizer check."""
