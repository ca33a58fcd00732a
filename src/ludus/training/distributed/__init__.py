"""Processes of one learner: start, rendezvous, collectives, FSDP2 sharding."""
