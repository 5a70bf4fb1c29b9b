"""The systems whose data planes are compared: one module each, with the interface of ``bench.peers.base``."""
