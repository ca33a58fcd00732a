"""From a configuration to an algorithm: presets, and which parts and settings exclude each other. No torch."""
