"""The conductor: which instance prefills a request, which decodes it, and what moves between them.

types chain index/ perf ledger cluster policies/ admission replication scheduler     the core: time and chance are arguments
events/ registry executors/ caching/ server/ standby                                 sockets and HTTP around it
simulate/                                                                            the core under a discrete-event clock
"""
