"""Requests and responses of the HTTP API."""
