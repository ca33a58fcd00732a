"""Code that runs inside the namespaces. These modules are sent into the sandbox, where they import only each other.

There are three kinds of processes. The *zygote*, process 1 of a bubblewrap sandbox, forks a *supervisor* into new
namespaces (user, process, mount, System V) on each request of the host, and never reads program output. The supervisor
is process 1 of those namespaces: it mounts an empty folder, receives one request, starts the *program*, monitors its
time, memory and output, kills all remaining processes, collects files, sends the response and exits, which removes
everything the run created. The program has no capabilities, a seccomp filter, and no descriptors but its three streams.
"""
