"""What operators ask of a rack: every daemon answers for itself, and here the answers are added up.

``rack`` asks all daemons of a ring, and says which did not answer; ``merging`` adds their answers up, ``finding``
finds what a person named in them; ``explaining`` says why a job is as fast as it is, and what more or less cache would
change. All but ``rack`` are pure.
"""
