"""Dialects of language model APIs, as the SDKs of agents speak them: requests and replies of sessions."""
