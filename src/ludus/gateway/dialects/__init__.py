"""Dialects of language model APIs, as used by the SDKs of agents: requests and replies of sessions."""
