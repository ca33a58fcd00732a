"""What a run would do on other machines: a cost model, and a simulation of the real code on a clock of its own."""
