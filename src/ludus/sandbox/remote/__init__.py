"""The sandbox over HTTP: server, clients of hosted services."""
