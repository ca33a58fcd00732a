"""The code world: programs from a specification, judged by tests whose answers no program ever sees."""
