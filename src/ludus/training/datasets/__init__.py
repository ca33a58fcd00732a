"""Demonstrations and pairs from files and from the Hugging Face hub."""
