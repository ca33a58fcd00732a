"""Generates the databases and questions of the world `sql`."""
