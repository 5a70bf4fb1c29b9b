"""Those whose data plane is compared: one module each, behind the one interface of ``bench.peers.base``."""
