"""Conversion of messages to tokens and back."""
