"""Episodes of several dialogues: rewritten context, and sub-agents."""
