"""Settings of parts of the section `rewards`."""
