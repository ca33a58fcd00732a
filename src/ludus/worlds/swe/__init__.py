"""Software repair: real packages with a bug, an issue, and tests that the model does not see."""
