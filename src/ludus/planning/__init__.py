"""What a run would do elsewhere: a cost model, and a simulation of the real code on a clock of its own."""
