"""The SQL world: questions over small databases, answered with SQLite queries."""
