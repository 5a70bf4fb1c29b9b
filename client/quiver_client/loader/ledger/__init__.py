"""The order that a run took, in a file: ``ledger=`` records it, ``replay=`` repeats it.

``recording`` is what a batch sampler uses; ``files`` writes and reads, in the frames of ``format``; ``batch_encoding``
is a batch as bytes, and ``amendments`` what was changed in one because of bad samples.
"""
