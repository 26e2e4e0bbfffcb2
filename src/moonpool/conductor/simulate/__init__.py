"""The conductor under a discrete-event clock: the same policies, index, ledger and admission as the live server."""
