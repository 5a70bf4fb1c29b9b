"""The origins that a daemon may read.

``allowed`` opens them for manifests and watches whether they can be read; ``unresponsive`` bounds how many fills wait
for an origin that does not answer.
"""
