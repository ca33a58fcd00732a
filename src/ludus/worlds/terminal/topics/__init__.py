"""What tasks are about: each module draws drafts of one topic."""
