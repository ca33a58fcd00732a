"""What runs inside the namespaces. These modules are sent into a cell and import only each other there.

Three kinds of processes. The *zygote* is process 1 of a cell: it forks a *guard* whenever the host asks, into
namespaces of its own (user, process, mount, System V), and never reads what a program wrote. The guard is
process 1 there: it mounts an empty folder, waits for one order, starts the *program*, watches its time,
memory and output, ends all that is left, collects files, answers and exits; with it goes all that the run
made. The program has no capabilities, a filter of system calls, and no descriptor but its three streams.
"""
