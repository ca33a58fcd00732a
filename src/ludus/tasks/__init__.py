"""Tasks: order and mixture."""
