"""Commands that configure, calibrate and check."""
