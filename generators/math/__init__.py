"""Generator of the problems of the world `math`."""
