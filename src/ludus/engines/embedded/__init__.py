"""The embedded engine: scheduler, paged KV cache, attention, sampling."""
