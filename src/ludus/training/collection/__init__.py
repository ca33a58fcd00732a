"""What a step trains on: prompts, rollouts, filters, demonstrations, the replay buffer."""
