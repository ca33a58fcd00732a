"""Programs that make the data of shipped environments. Not in the wheel."""
