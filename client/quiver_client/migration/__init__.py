"""Moving jobs: what a saved job still needs, brought to another rack before it resumes; and which rack to choose.

``checkpoint`` finds loaders' states in files, without running any code of theirs, and ``choice`` those of the job;
``remaining`` says which shards they still need, in order; ``warming`` brings them into a cache and composes the rest:
``residency`` is which of them a rack has already, ``holding`` keeps them there. ``racks`` asks what there is in several
racks, and ``placing`` decides which of them should run which job.
"""
