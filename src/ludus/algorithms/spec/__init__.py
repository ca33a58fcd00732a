"""An algorithm as data: options, bounds, presets, compatibility. No torch."""
