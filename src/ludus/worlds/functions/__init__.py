"""The functions world: requests to fulfil with a catalogue of typed functions, or to decline."""
