"""Backends on this machine: namespaces, containers, plain processes."""
