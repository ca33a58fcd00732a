"""Commands that read runs: reports, transcripts, exports, rewards and behavior of saved rollouts."""
