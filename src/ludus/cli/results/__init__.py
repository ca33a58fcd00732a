"""Commands that look at runs: reports, transcripts, exports, rewards and behavior of saved rollouts."""
