"""Commands that look at runs: evaluations, comparisons, transcripts, rewards of saved rollouts."""
