"""The functions world: requests that a catalogue of typed functions fulfils, or that it does not."""
