"""Tree search over turns."""
