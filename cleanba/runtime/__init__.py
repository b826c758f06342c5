"""How training runs: threads, queues, devices, files.  Imports no algorithm; no line here can move a learning curve."""
