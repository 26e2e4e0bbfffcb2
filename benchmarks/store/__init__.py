"""The pool side by side with the real Mooncake Store, and with what the machine could do at best: `make bench-store`.

__main__   options, order of the sections, the figures
peer_venv  a virtual environment with the real package
network    namespaces of our own: the peer cannot be bound to loopback, so nothing else may be there
sides      starts master, holder and client of each side; one handle for all of them
worker     a client process: does what the handle says and answers with times (runs in either environment)
ours, peer the two adapters that a worker drives
workload   keys, buffers, the timed loops: the same code for both sides
"""
