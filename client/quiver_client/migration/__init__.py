"""Moving a job to another rack: what a saved job still needs, brought there before it resumes, and kept until it does.

``checkpoint`` finds loaders' states in files, without running any code of theirs; ``remaining`` says which shards a
state still needs, in order; ``warming`` brings them into a cache and composes the rest: ``residency`` is which of them
a rack has already, ``holding`` keeps them there. ``racks`` is what can be known of a rack before a job runs in it.
"""
