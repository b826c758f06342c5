"""How training runs: threads, queues, devices, files.  It imports no algorithm."""
