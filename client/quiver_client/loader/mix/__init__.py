"""The order of a mixture of datasets.

``sampler`` is the batch sampler: ``schedule`` says how many samples of each part a batch has, ``part`` keeps a part's
passes, ``mixed_pass`` is one pass over the mixture. ``guided`` follows the losses that the loop reports; ``state`` is
the checkpoint, and ``agreement`` what ranks must agree on.
"""
