"""The conductor: which instance prefills a request, which decodes it, and what moves between them.

core      types chain index/ ledger perf cluster scheduler policies/ admission replication     pure: time and chance are arguments
live      events/ registry executors/ caching/ server/ standby                                    sockets and HTTP around the core
simulate/                                                                                          the core under a discrete-event clock
"""
