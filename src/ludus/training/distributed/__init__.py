"""Ranks of one learner: launcher, rendezvous, collectives, FSDP2 sharding."""
