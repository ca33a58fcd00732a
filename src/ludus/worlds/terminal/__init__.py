"""The terminal world: work in a shell, judged on the host by the files that it leaves."""
