"""Sample in other processes, on one or many machines."""
