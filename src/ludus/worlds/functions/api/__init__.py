"""APIs that run as programs, with their schemas."""
