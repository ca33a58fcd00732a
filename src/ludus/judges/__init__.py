"""LLM judges: prompts, replies, rubrics, and their calibration against a verifier."""
