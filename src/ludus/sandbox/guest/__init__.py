"""Code that runs inside the namespaces. These modules are sent into a cell, where they import only each
other.

There are three kinds of processes. The *zygote*, process 1 of a cell, forks a *guard* into new namespaces
(user, process, mount, System V) on each request of the host, and never reads program output. The guard is
process 1 of those namespaces: it mounts an empty folder, waits for one order, starts the *program*, monitors
its time, memory and output, ends all remaining processes, collects files, responds and exits, which removes
everything the run created. The program has no capabilities, a seccomp filter, and no descriptors but its
three streams.
"""
