"""The functions of the catalogue by domain: what each takes, says, gives, and does to an episode's state."""
