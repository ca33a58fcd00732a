"""The household world: find objects in rooms, change them, and bring them to places."""
