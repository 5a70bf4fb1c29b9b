"""Is the harness able to fail? Each bug of a list is planted in a copy of the sources, and a test has to catch it.

A bug that nothing catches is a missing test. No switch for this is in the product: a bug is an edit of its text, which
``test_planted`` checks to apply exactly once, so that the list cannot go stale in silence.

    python -m tests.planted                     plants all, two at a time, and prints "caught N of N"
    python -m tests.planted --only NAME ...     plants some; --find runs whole files and names the tests that catch

- ``bugs``: the list, made of ``kernel``, ``daemon`` and ``client``; ``plant``: what a planted bug is
- ``run``: copies, plants, runs the tests and judges their result; ``zygote``: a process that runs them without the
  imports of a start; ``test_planted``: all of it as tests
"""
