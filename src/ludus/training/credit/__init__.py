"""From rewards to advantages: self-play roles, turn rewards, estimates, calibration."""
