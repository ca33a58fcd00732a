"""What a run says about itself: metrics and trackers."""
