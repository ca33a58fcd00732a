"""The verdict on a patch: masked tests, leak tests, the runner inside the sandbox."""
