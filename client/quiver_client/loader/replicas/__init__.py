"""Parallel replicas: ranks that must get the same samples in the same order, as those of one tensor-parallel model do.

Which samples a batch holds depends on what is resident when it is drawn, so two ranks that decide by themselves differ.
Here the first rank of each group decides and reports needs, and the others follow its decisions.

- ``group``: which ranks those are, from a device mesh or a process group; ``agreement``: whether they began alike
- ``log``: what was decided, and how far each follower is, as values; ``messages``: how that travels
- ``meeting``: how followers find their leader; ``leader`` and ``follower``: the two ends of the connections
  ``connection``: a socket that messages go through
- ``role``: what a rank does in its group, as the sampler uses it; ``patience``: how long its loop waits for others
"""
