"""Model weights: loading, LoRA, fingerprints."""
